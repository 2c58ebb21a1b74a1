"""`windlass checkpoint ls` and `verify`: list the checkpoints of a folder, and verify every byte of them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from windlass.checkpoint.foreign import format_of
from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere
from windlass.checkpoint.retention import metric_of
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.survey import Found, RunNotes, look_at, marks_of, notes_of, survey
from windlass.cli.estimate_memory import print_table
from windlass.cli.sizes import in_words
from windlass.core.errors import CheckpointError
from windlass.core.locations import is_url
from windlass.core.output import one_line, say, say_json

HEADERS = ("step", "saved", "size", "ranks", "metric", "marks", "state")


def list_command(options: argparse.Namespace) -> int:
    """Print the checkpoints in a run's folder, in the runs below a folder, or the given one; return the exit code."""
    runs = {
        folder: _rows(list(found))
        for folder, found in groupby(checkpoints_in(options.folder), lambda one: one.path.parent)
    }
    if options.json:
        say_json([row for rows in runs.values() for row in rows])
        return 0
    for number, (folder, rows) in enumerate(runs.items()):
        if folder != local_path(options.folder) and not is_one_checkpoint(local_path(options.folder)):
            say(f"{chr(10) if number else ''}{one_line(str(folder))}")
        print_table([HEADERS, *(_cells(row) for row in rows)], str.ljust)
    return 0


def _rows(found: list[Found]) -> list[dict[str, Any]]:
    """Return the values of each row; the marks compare a checkpoint with all of its run."""
    of_run = survey(found[0].path.resolve().parent)
    whole = [one.info for one in of_run if one.info is not None and one.problem is None]
    notes = notes_of(whole)
    return [_row(one, whole, notes) for one in found]


def verify_command(options: argparse.Namespace) -> int:
    """Verify every byte of each, and print the first damaged file; return 1 if there is one."""
    rows = map(_verified, checkpoints_in(options.folder))
    if options.json:
        found = list(rows)
        say_json(found)
        return 1 if any(row["problem"] for row in found) else 0
    failed = False
    for row in rows:  # each line as soon as its bytes are read
        whole = f"whole, {row['files']} files, {in_words(row['bytes'] or 0)}{row['note']}"
        say(one_line(f"{row['path']}: {row['problem'] or whole}"))
        failed = failed or row["problem"] is not None
    return 1 if failed else 0


def _verified(one: Found) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return what was found."""
    row: dict[str, Any] = {"path": str(one.path), "files": None, "bytes": None, "note": "", "problem": None}
    try:
        info = Store(one.path.parent).verify(one.path)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"Can't find a valid checkpoint at {one.path}: ")
        return row | {"problem": _foreign_note(one.path) or reason}
    return row | {"files": len(info.files), "bytes": info.nbytes, "note": lies_elsewhere(info)}


def checkpoints_in(folder: str) -> list[Found]:
    """Return the given checkpoint, or all in a run's folder, or all of the runs below. Raises CheckpointError if there
    is none.
    """
    path = local_path(folder)
    if is_one_checkpoint(path):
        return [look_at(path)]
    found = survey(path) or [one for run in _runs_below(path) for one in survey(run)]
    if not found:
        raise CheckpointError(f"{path} has no checkpoints, nor has a folder below it")
    return found


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the folders with checkpoints, sorted; hidden folders and those of runs are not searched further."""
    for place, folders, _ in os.walk(path):
        if place != str(path) and Store(Path(place)).folders():
            yield Path(place)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def local_path(word: str) -> Path:
    """Return a folder of this machine. Raises CheckpointError if it does not exist or is a URL."""
    if is_url(word):
        raise CheckpointError(f"{word} is not a folder of this machine; download it first")
    path = Path(word).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    return path


def is_one_checkpoint(path: Path) -> bool:
    """Return True for a checkpoint, also if it has only its name and has lost the manifest."""
    named_so = {found.resolve() for found in Store(path.resolve().parent).folders()}
    return is_checkpoint(path) or path.resolve() in named_so


def _row(one: Found, whole: list[CheckpointInfo], notes: RunNotes) -> dict[str, Any]:
    info = one.info
    return {
        "path": str(one.path),
        "step": info and info.step,
        "saved_at": one.saved_at,
        "bytes": info and info.nbytes,
        "world_size": info and info.world_size,
        "metric": info and metric_of(info),
        "metric_name": notes.metric,
        "marks": [] if info is None or one.problem else marks_of(info, whole, notes),
        "problem": one.problem and (_foreign_note(one.path) or one.problem),
    }


def _foreign_note(path: Path) -> str | None:
    """A note on a checkpoint that another program wrote, None for any other folder."""
    if (found := format_of(path)) is None:
        return None
    return f"{found.WRITER} wrote it, without hashes to verify it by; train(resume_from_checkpoint=...) takes its path"


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
