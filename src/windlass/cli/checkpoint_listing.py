"""`windlass checkpoint ls`, `verify`, `diff` and `prune`: list the checkpoints of a folder, verify every byte of them,
compare two, and remove all but the newest and the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import groupby
from math import inf, isnan
from pathlib import Path
from typing import Any

from windlass.callbacks.log_table import moment_text
from windlass.checkpoint.compare import Comparison, Difference, compare
from windlass.checkpoint.foreign import format_of
from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere
from windlass.checkpoint.retention import Retention, metric_of, surplus
from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.stored import open_folder
from windlass.checkpoint.survey import Found, RunNotes, look_at, marks_of, notes_of, survey
from windlass.cli.command_line import answer, folders_below, in_words
from windlass.core.errors import CheckpointError
from windlass.core.locations import at_home, is_url, named
from windlass.core.output import one_line, say, say_json, table

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
        for line in table([HEADERS, *(_cells(row) for row in rows)]):
            say(line)
    return 0


def _rows(found: list[Found]) -> list[dict[str, Any]]:
    """Return the values of each row; the marks compare a checkpoint with all of its run."""
    # Also for a single one: whether it is the newest or the best is a matter of all.
    of_run = survey(found[0].path.resolve().parent)
    whole = [one.info for one in of_run if one.info is not None and one.problem is None]
    notes, damaged = RunNotes(), dict[str, str]()
    while whole:
        try:
            notes = notes_of(whole)
            break
        except CheckpointError as error:  # of the newest, in its content: sizes do not show it
            damaged[whole.pop().path.name] = str(error)
    found = [replace(one, problem=one.problem or damaged.get(one.path.name)) for one in found]
    return [_row(one, whole, notes) for one in found]


def verify_command(options: argparse.Namespace) -> int:
    """Verify every byte of each, and print the first damaged file; return 1 if there is one."""
    found = []
    for one in checkpoints_in(options.folder):
        found.append(row := _verified(one))
        if not options.json:  # each line as soon as its bytes are read
            whole = f"whole, {row['files']} files, {in_words(row['bytes'] or 0)}{row['note']}"
            say(one_line(f"{row['path']}: {row['problem'] or whole}"))
    return answer(options, found, (), code=int(any(row["problem"] for row in found)))


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
        return [look_at(path.resolve() if path.is_symlink() else named(path))]
    found = survey(path) or [one for folder in folders_below(path) for one in survey(folder)]
    if not found:
        raise CheckpointError(f"{path} has no checkpoints, nor has a folder below it")
    return found


def local_path(word: str) -> Path:
    """Return a folder of this machine. Raises CheckpointError if it does not exist or is a URL."""
    if is_url(word):
        raise CheckpointError(f"{word} is not a folder of this machine; download it first")
    path = at_home(word)
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
    cells = (
        Path(row["path"]).name if row["step"] is None else str(row["step"]),
        moment_text(row["saved_at"]) or "-",
        "-" if row["bytes"] is None else in_words(row["bytes"]),
        "-" if row["world_size"] is None else str(row["world_size"]),
        "-" if row["metric"] is None else f"{row['metric']:.6g}",
        ", ".join(row["marks"]) or "-",
        "whole" if row["problem"] is None else row["problem"],
    )
    return tuple(map(one_line, cells))


def prune_command(options: argparse.Namespace) -> int:
    """Remove complete checkpoints that are not to be kept, and print them; return the exit code.

    The newest and the best of the run, which a resumed run needs, are always kept, and damaged ones are not touched.
    Raises CheckpointError if the content of the newest is damaged.
    """
    keep_last, keep_best, dry_run = options.keep_last, options.keep_best, options.dry_run
    if keep_last is None and keep_best is None:
        raise CheckpointError("set what to keep: --keep-last N, --keep-best N or both")
    store = Store(local_path(options.folder))
    if is_one_checkpoint(store.root):
        raise CheckpointError(f"{store.root} is one checkpoint: name its folder, {named(store.root).parent}")
    if not store.whole():
        raise CheckpointError(f"{store.root} has no complete checkpoints")
    # Not beside a run that saves into the folder: its own retention would miss what goes here. What goes is chosen
    # under the lock, because a run that has just ended may have a newer best.
    with nullcontext() if dry_run else RunLock(store.root):
        whole = store.whole()
        # Each of its bytes: if sizes hide a damage, a run resumes from an older one.
        store.verify(whole[-1].path)
        notes = notes_of(whole)
        if keep_best is not None and all(metric_of(info) is None for info in whole):
            raise CheckpointError(f"no checkpoint in {store.root} has a metric; use --keep-last")
        policy = Retention(last=keep_last, best=keep_best, greater_is_better=notes.greater_is_better)
        going = surplus(whole, policy, [] if notes.best is None else [store.root / notes.best])
        for info in going:
            if not dry_run:
                store.remove(info.path)
            done = "would be removed" if dry_run else "removed"
            if not options.json:
                say(f"{one_line(info.path)}: {done}, {in_words(info.nbytes)}")
    listed = [{"path": info.path, "step": info.step, "bytes": info.nbytes} for info in going]
    facts = {"removed": not dry_run, "complete": len(whole), "checkpoints": listed}
    freed = in_words(sum(info.nbytes for info in going))
    return answer(options, facts, [f"{len(going)} of {len(whole)} complete checkpoints, {freed}"])


_LISTED = 5  # differences of one file; more are counted


def diff_command(options: argparse.Namespace) -> int:
    """Print the differences; return 0 if there are none, else 1."""
    found = compare(open_folder(local_path(options.first)), open_folder(local_path(options.second)))
    return answer(options, asdict(found), _lines(found), code=0 if found.same else 1)


def _lines(found: Comparison) -> Iterator[str]:
    for where, group in groupby(found.differences, key=lambda difference: difference.where):
        for line in _in_short(list(group)):
            yield one_line(f"{where}: {line}")
    count = len(found.differences)
    result = "nothing differs" if found.same else f"{count} difference{'' if count == 1 else 's'}"
    listed = "" if count <= _LISTED else " (--json lists them)"
    yield f"{result}{listed}; {found.equal_tensors} tensors have equal bits"


def _in_short(differences: list[Difference]) -> Iterator[str]:
    """Yield lines on what differs in one place: many tensors, and the rows of a list, as their number."""
    tensors = [one for one in differences if one.largest is not None]
    if len(tensors) > _LISTED:
        most = max(tensors, key=lambda one: inf if isnan(one.largest or 0) else one.largest or 0)
        yield f"{len(tensors)} tensors differ, most of all {most.name}: {most.what}"
        differences = [one for one in differences if one.largest is None]
    rows: dict[str, list[str]] = {}
    for one in differences:
        name, _, inside = one.name.partition("/")
        row, _, column = inside.partition("/")
        if row.isdigit() and column:
            rows.setdefault(name, []).append(row)
    rows = {name: found for name, found in rows.items() if len(found) > _LISTED}
    single = [one for one in differences if one.name.partition("/")[0] not in rows]
    for one in single[:_LISTED]:
        yield f"{one.name}: {one.what}" if one.name else one.what
    if len(single) > _LISTED:
        yield f"{len(single) - _LISTED} more"
    for name, found in rows.items():
        yield f"{name}: different in {len(set(found))} of its rows"
