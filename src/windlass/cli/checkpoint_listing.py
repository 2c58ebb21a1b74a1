"""`windlass checkpoint ls` and `verify`: what lies in a folder, and whether every byte of it is as it was saved."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere
from windlass.checkpoint.retention import metric_of
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.survey import FOREIGN, Found, RunNotes, look_at, marks_of, notes_of, survey
from windlass.cli.estimate_memory import in_words
from windlass.core.errors import CheckpointError
from windlass.core.locations import is_url
from windlass.core.output import one_line, say

HEADERS = ("step", "saved", "size", "ranks", "metric", "marks", "state")


def list_command(folder: str, as_json: bool) -> int:
    """Print the checkpoints in a run's folder, or the one that is named; returns the exit code."""
    found = checkpoints_in(folder)
    of_run = survey(Store(found[0].path.resolve().parent)) if is_one_checkpoint(local_path(folder)) else found
    whole = [one.info for one in of_run if one.info is not None and one.problem is None]
    notes = notes_of(whole)
    rows = [_row(one, whole, notes) for one in found]
    if as_json:
        say(json.dumps(rows, indent=2))
        return 0
    table = [HEADERS, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(HEADERS))]
    for cells in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0


def verify_command(folder: str) -> int:
    """Check every byte of each; returns 1 where one is wrong, which is said with the file."""
    failed = 0
    for one in checkpoints_in(folder):
        try:
            info = Store(one.path.parent).verify(one.path)
        except CheckpointError as error:
            reason = FOREIGN if one.problem == FOREIGN else _reason(error, one.path)
            say(one_line(f"{one.path}: {reason}"))
            failed += 1
        else:
            say(f"{one.path}: whole, {len(info.files)} files, {in_words(info.nbytes)}{lies_elsewhere(info)}")
    return 1 if failed else 0


def checkpoints_in(folder: str) -> list[Found]:
    """What a word on the command line names: one checkpoint, or all in a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    path = local_path(folder)
    if is_one_checkpoint(path):
        return [look_at(path)]
    found = survey(Store(path))
    if not found:
        raise CheckpointError(f"{path} holds no checkpoints")
    return found


def local_path(word: str) -> Path:
    """The folder that a word names.

    Raises:
        CheckpointError: there is none, or it is a URL.
    """
    if is_url(word):
        raise CheckpointError(f"{word} is not a folder of this machine; download it, and name that folder")
    path = Path(word).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    return path


def is_one_checkpoint(path: Path) -> bool:
    """Also by its name alone, without a manifest that says so: it has lost it."""
    named_so = {found.resolve() for found in Store(path.resolve().parent).folders()}
    return is_checkpoint(path) or path.resolve() in named_so


def _reason(error: CheckpointError, path: Path) -> str:
    return str(error).removeprefix(f"Can't find a valid checkpoint at {path}: ")


def _row(one: Found, whole: list[CheckpointInfo], notes: RunNotes) -> dict[str, Any]:
    info = one.info
    return {
        "path": str(one.path),
        "step": None if info is None else info.step,
        "saved_at": one.saved_at,
        "bytes": None if info is None else info.nbytes,
        "world_size": None if info is None else info.world_size,
        "metric": None if info is None else metric_of(info),
        "metric_name": notes.metric,
        "marks": [] if info is None or one.problem else marks_of(info, whole, notes),
        "problem": one.problem,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    saved = row["saved_at"]
    cells = (
        Path(row["path"]).name if row["step"] is None else str(row["step"]),
        "-" if saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)),
        "-" if row["bytes"] is None else in_words(row["bytes"]),
        "-" if row["world_size"] is None else str(row["world_size"]),
        "-" if row["metric"] is None else f"{row['metric']:.6g}",
        ", ".join(row["marks"]) or "-",
        "whole" if row["problem"] is None else row["problem"],
    )
    return tuple(map(one_line, cells))
