"""`windlass status`: the state of a run, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.callbacks.log_table import clock_text, moment_text
from windlass.callbacks.run_view import RunView, is_run, read_run
from windlass.cli.command_line import CommandParser, answer, local_place
from windlass.cli.run_status import SCHEMA_FILE, status_of_run, with_verified
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.output import one_line, say
from windlass.core.terminal import folded

_MOST_SHARES = 5


def status_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    if options.schema:
        say(SCHEMA_FILE.read_text(encoding="utf-8").rstrip())
        return 0
    if options.run is None:
        raise ConfigError(Problem("RUN", "missing", "give the folder of a run (output_dir)"))
    run: Path = options.run
    if not is_run(run):
        raise ConfigError(
            Problem("RUN", str(run), "is not the folder of a run; windlass ps lists those below a folder")
        )
    view = read_folder(run)
    found = status_of_run(with_verified(view) if options.verify else view)
    return answer(options, found, _lines(found))


def read_folder(run: Path) -> RunView:
    """Read a run. Raises DataError if its folder cannot be read."""
    try:
        return read_run(run)
    except OSError as error:
        raise unreadable(run, error) from error


def unreadable(run: Path, error: OSError) -> DataError:
    """Return the error of a folder that cannot be read."""
    return DataError(f"{run} cannot be read: {error}")


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass status",
        description="Print the state of a run from its folder, which is only read: also while it runs, after it was "
        "killed, and of a copy.",
        example="windlass status runs/first",
    )
    parser.add_argument(
        "run", metavar="RUN", type=local_place, nargs="?", help="the run's folder (output_dir)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object, which --schema describes")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte of the newest checkpoint, and of the one before if it is damaged",
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of --json, and exit")
    return parser


# --- for people -------------------------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    sure = "" if found["sureness"] == "certain" else f" ({found['sureness']}: {found['why']})"
    yield one_line(f"{found['name']}: {found['sentence']}{sure}")
    for name, value in facts_of(found):
        row = one_line(f"  {name:<12} {value}")
        yield row if name == "resume" else folded(row, 15)  # a command stays as it is, to be copied


def facts_of(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run as names and values, for people."""
    if found["loss"] is not None:
        rates = found["rates"]
        speeds = [(unit, rates[f"{unit}_per_second"]) for unit in ("tokens", "samples")]
        speed = [f"{value:,.1f} {unit}/s" for unit, value in speeds if value is not None][:1]
        mfu = [] if rates["mfu"] is None else [f"MFU {rates['mfu']:.1%}"]
        loss = f"{found['loss']['value']:.4g} at step {found['loss']['step']:,}"
        yield "loss", ", ".join([loss, *speed, *mfu])
    if found["evaluation"] is not None:
        metrics = ", ".join(
            f"{name} {value:.4g}" for name, value in list(found["evaluation"]["metrics"].items())[:4]
        )
        yield "evaluation", f"{metrics} at step {found['evaluation']['step']:,}"
    if found["eta_seconds"] is not None:
        yield "left", f"about {clock_text(found['eta_seconds'])}"
    one = found["checkpoint"]
    if one is None:
        yield "checkpoint", "none that is whole"
    else:
        saved = "" if one["saved_at"] is None else f", {moment_text(one['saved_at'])}"
        how = {
            "bytes": "every byte verified",
            "sizes": "committed, all files in their sizes; --verify reads them",
        }
        yield "checkpoint", f"{one['path']} (step {one['step']:,}{saved}): {how[one['verified']]}"
    for damaged in found["damaged_checkpoints"]:
        yield "damaged", damaged["problem"]
    risk = found["at_risk"]
    if risk is not None and (risk["updates"] or found["state"] == "running"):
        time_lost = "" if risk["seconds"] is None else f", {clock_text(risk['seconds'])}"
        lost = "would be lost if it died now" if found["state"] == "running" else "to be done again"
        yield "at risk", f"{risk['updates']:,} updates{time_lost} {lost}"
    command = found["resume"]["command"]
    if found["state"] not in ("finished", "running") and command is not None:
        needs = found["resume"]["needs"]
        yield "resume", command + (f"   ({needs})" if needs else "")
    yield from _more(found)


def _more(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    slowest = found["slowest_rank"]
    if slowest is not None:
        yield "slowest rank", f"{slowest['rank']}: others wait for it {slowest['wait']:.1%} of the time"
    goodput = found["goodput"]
    if goodput is not None and goodput["wall_seconds"] > 0:
        parts = sorted(goodput["seconds"].items(), key=lambda pair: -pair[1])[:_MOST_SHARES]
        shares = ", ".join(
            f"{kind.replace('_', '-')} {value / goodput['wall_seconds']:.1%}" for kind, value in parts
        )
        yield "goodput", f"{goodput['share']:.1%} of {clock_text(goodput['wall_seconds'])}: {shares}"
    if (memory := found["memory"]) is not None:
        measured, predicted = (memory[name] / 2**30 for name in ("measured", "predicted"))
        error = predicted / measured - 1
        yield (
            "memory",
            f"{measured:.3g} GiB at the peak of rank 0; the plan was {predicted:.3g} GiB ({error:+.1%})",
        )
    if len(found["attempts"]) > 1:
        repeated = sum(attempt["repeated"] for attempt in found["attempts"])
        yield "attempts", f"{len(found['attempts'])}, {repeated:,} updates repeated"
    for alert in found["alerts"]:
        yield "alert", f"step {alert['step']:,}: {alert['message']}"
    for note in found["notes"]:
        yield "note", note
