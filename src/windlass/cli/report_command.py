"""`windlass report`: write the report of a run from its folder."""

from __future__ import annotations

from pathlib import Path

from windlass.callbacks.metrics_log import FILE_NAME
from windlass.callbacks.report import write_report
from windlass.callbacks.run_view import RunView, is_run
from windlass.checkpoint.run_lock import is_held
from windlass.cli.command_line import CommandParser, answer, local_place
from windlass.cli.run_status import status_of_run
from windlass.cli.status_command import facts_of
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import install_command, is_available
from windlass.core.output import say


def report_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    run, *others = options.runs
    for one in options.runs:
        if not is_run(one):
            raise ConfigError(Problem("RUN", str(one), _fix(one)))
    written = write_report(
        run, options.output_dir or run, runs=is_held(run), others=others, describe=described
    )
    missing = (
        ""
        if is_available("matplotlib")
        else f"training.png needs matplotlib: {install_command('matplotlib')}"
    )
    files = [str(path) for path in written]
    answer(options, {"written": files, "notes": [missing] if missing else []}, files)
    if missing and not options.json:
        say(missing, error=True)
    return 0


def described(view: RunView) -> list[tuple[str, str]]:
    """Return what `windlass status` prints of a run, as its page shows it: notes and goodput have their own places."""
    return [pair for pair in facts_of(status_of_run(view)) if pair[0] not in ("note", "goodput", "attempts")]


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass report",
        description="Write report.html and training.png of a run from its folder, also while it runs and after it was "
        "killed. Several runs are drawn over each other. Their other files are only read.",
        example="windlass report runs/first",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=local_place, nargs="+", help="the folder of a run (output_dir)"
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=local_place,
        help="where the report goes; by default the first RUN",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    return parser


def _fix(run: Path) -> str:
    below = sorted(str(path.parent) for path in run.glob(f"*/{FILE_NAME}")) if run.is_dir() else []
    if below:
        return f"holds runs, and is not one; give one of them: {', '.join(below)}"
    return f"is not the folder of a run, which has {FILE_NAME}"
