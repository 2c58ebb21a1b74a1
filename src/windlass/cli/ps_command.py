"""`windlass ps`: list the runs below a folder, from their files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.callbacks.log_table import clock_text
from windlass.callbacks.run_view import is_run
from windlass.cli.command_line import CommandParser, answer, folders_below, local_place
from windlass.cli.run_status import status_of_run
from windlass.cli.status_command import read_folder
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.output import one_line, say, table

SCHEMA = "windlass-ps/1"
HEADERS = ("run", "state", "step", "loss", "left", "checkpoint", "goodput", "alerts")


def ps_command(words: list[str]) -> int:
    """Print one line for each run below a folder; return the exit code: 1 if one of them cannot be read."""
    options = build_parser().parse_args(words)
    if not options.folder.is_dir():
        raise ConfigError(Problem("DIR", str(options.folder), "is not a folder"))
    found, unread = [], []
    # All before the first line: the widths of columns depend on each run.
    for name, path in runs_below(options.folder):
        try:
            found.append((name, status_of_run(read_folder(path))))
        except DataError as error:  # as of another user: the others are listed all the same
            unread.append(str(error))
    facts = {"schema": SCHEMA, "runs": [status for _, status in found], "unreadable": unread}
    lines = list(table([HEADERS, *(_cells(*one) for one in found)])) if found else []
    if not found and not unread:
        lines = [f"no runs below {options.folder}"]
    answer(options, facts, lines)
    for problem in () if options.json else unread:
        say(one_line(problem), error=True)
    return int(bool(unread))


def runs_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and folders of runs, sorted."""
    for path in folders_below(root):
        if is_run(path):
            yield str(path.relative_to(root)) if path != root else path.absolute().name, path


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass ps",
        description="List the runs below a folder, with their state.",
        example="windlass ps runs",
    )
    parser.add_argument("folder", metavar="DIR", type=local_place, help="a folder with runs below it")
    parser.add_argument("--json", action="store_true", help="as one JSON object with the status of each run")
    return parser


def _cells(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    loss, one, goodput = found["loss"], found["checkpoint"], found["goodput"]
    step = f"{found['step']:,}" + (f" / {found['max_steps']:,}" if found["max_steps"] else "")
    cells = (
        name,
        found["state"] + ("" if found["sureness"] == "certain" else "?"),
        step,
        "-" if loss is None else f"{loss['value']:.4g}",
        "-" if found["eta_seconds"] is None else clock_text(found["eta_seconds"]),
        "-" if one is None else str(one["step"]),
        "-" if goodput is None else f"{goodput['share']:.1%}",
        str(len(found["alerts"])) if found["alerts"] else "-",
    )
    return tuple(map(one_line, cells))
