"""Lists the checkpoints in a run's folder, damaged ones too, for the command line and for pages. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, CheckpointInfo, check_sizes, read_manifest
from windlass.checkpoint.retention import best_of
from windlass.checkpoint.verified import VerifiedFiles
from windlass.core.errors import CheckpointError

_FOLDER = re.compile(r"(?:replaced-)?checkpoint-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Found:
    """A folder that is a checkpoint by its name. Without a `problem` it has all its files in their sizes; their content
    was not read unless it is `verified`. `saved_at` is in seconds since 1970.
    """

    path: Path
    info: CheckpointInfo | None
    problem: str | None
    saved_at: float | None
    is_best: bool = False  # no other has a better metric, as the run noted
    verified: bool = False  # every byte of it was read, and is what was saved

    @property
    def step(self) -> int:
        return (step_in(self.path) or 0) if self.info is None else self.info.step

    @property
    def metric(self) -> float | None:
        """Of the evaluation at its step."""
        value = None if self.info is None else self.info.meta.get("metric")
        return value if isinstance(value, float) else None

    @property
    def ephemeral(self) -> bool:
        """True if it only serves to resume."""
        return self.info is not None and self.info.meta.get("ephemeral") is True


def survey(folder: Path) -> list[Found]:
    """All checkpoints of a run in order of their commits, those with an unreadable manifest first."""
    found = [look_at(path) for path in folder.iterdir() if step_in(path) is not None and path.is_dir()]
    # One that was replaced counts until its successor is committed.
    committed = {one.path.name for one in found if one.saved_at is not None}
    found = [one for one in found if one.path.name.partition("replaced-")[2] not in committed]
    return sorted(found, key=lambda one: (-1, step_in(one.path) or 0) if one.info is None else one.info.order)


def step_in(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for another name."""
    match = _FOLDER.fullmatch(path.name)
    return None if match is None else int(match[1])


def look_at(path: Path) -> Found:
    """The checkpoint in one folder."""
    info = None
    try:
        saved_at = os.stat(path / MANIFEST_NAME).st_mtime
    except OSError:
        saved_at = None
    try:
        info = read_manifest(path, Files())
        check_sizes(info)
    except (CheckpointError, OSError) as error:
        return Found(path, info, str(error), saved_at)
    return Found(path, info, None, saved_at)


@dataclass(frozen=True, slots=True)
class RunNotes:
    """Notes on a run in its newest complete checkpoint."""

    metric: str | None = None  # name of the metric for the best model
    greater_is_better: bool = False
    best: str | None = None  # name of the folder of the best model so far
    keep_best: int = 0  # number of best checkpoints that are kept


def notes_of(whole: list[CheckpointInfo]) -> RunNotes:
    """Read the notes of the newest one; empty if there is none, or a script wrote its own files."""
    if not whole:
        return RunNotes()
    arguments, state = _tree(whole[-1], "training_args.json"), _tree(whole[-1], "trainer_state.json")
    metric, best = arguments.get("metric_for_best_model"), state.get("best_model_checkpoint")
    keep_best = arguments.get("keep_best")
    return RunNotes(
        metric=metric if isinstance(metric, str) else None,
        greater_is_better=arguments.get("greater_is_better") is True,
        best=Path(best).name if isinstance(best, str) else None,
        keep_best=keep_best if type(keep_best) is int and keep_best > 0 else 0,
    )


def _tree(info: CheckpointInfo, name: str) -> Mapping[str, Any]:
    if name not in info.files:
        return {}
    path = info.path / name
    tree = strict_json.read(path, VerifiedFiles(info, Files()))
    return tree if isinstance(tree, dict) else {}


def marks_of(info: CheckpointInfo, whole: list[CheckpointInfo], notes: RunNotes) -> list[str]:
    """The roles of a checkpoint: "last", "best", "ephemeral"."""
    marks = []
    if whole and info.path.name == whole[-1].path.name:
        marks.append("last")
    count = notes.keep_best or (1 if notes.best is None else 0)
    rated = [one.path.name for one in best_of(whole, count, notes.greater_is_better)]
    if info.path.name == notes.best or info.path.name in rated:
        marks.append("best")
    if info.meta.get("ephemeral"):
        marks.append("ephemeral")
    return marks
