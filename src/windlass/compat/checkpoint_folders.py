"""Folders of checkpoints by the names that scripts expect: `checkpoint-STEP` in the output folder.

The Trainer itself lists, verifies and removes checkpoints by their manifests (`windlass.checkpoint`); an unfinished one
has another name, so a folder that is found here is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from windlass.config.arguments import TrainingArguments
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger, warn_once

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINER_STATE_NAME = "trainer_state.json"
_COMPARED = ("logging_steps", "eval_steps", "save_steps")
_logger = get_logger(__name__)


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The `checkpoint-STEP` of the highest step in `folder`, as a path; None if there is none. Raises OSError if the
    folder cannot be read.
    """
    steps = {}
    for entry in os.scandir(folder):
        found = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", entry.name)
        if found and entry.is_dir():
            steps[int(found[1])] = entry.name
    # By number: by name, checkpoint-999 comes after checkpoint-1000.
    return os.path.join(folder, steps[max(steps)]) if steps else None


def sort_checkpoints(
    output_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """The paths of the checkpoints in `output_dir`, oldest first.

    Args:
        checkpoint_prefix: their names begin with it and a dash.
        use_mtime: sort by the time of the last change instead of by step. If all were changed within a second, as
            some file systems say, the step decides.
        best_model_checkpoint: this one comes last but one, unless it is the newest.
    """
    steps: dict[str, int] = {}
    for path in Path(output_dir).glob(f"{checkpoint_prefix}-*"):
        found = re.match(r"\d+", path.name.removeprefix(f"{checkpoint_prefix}-"))
        if path.is_dir() and (found or use_mtime):
            steps[str(path)] = int(found[0]) if found else -1
    ordered = sorted(steps, key=lambda path: (steps[path], path))
    if use_mtime and ordered:
        changed = {path: os.path.getmtime(path) for path in ordered}
        if max(changed.values()) - min(changed.values()) >= 1:
            ordered.sort(key=changed.__getitem__)
        else:
            ordered = [path for path in ordered if steps[path] >= 0]
    best = [path for path in ordered[:-1] if _is_same(path, best_model_checkpoint)]
    return [path for path in ordered[:-1] if path not in best] + best + ordered[-1:]


def _is_same(path: str, other: str | None) -> bool:
    """Whether two paths are one folder: a state has it as an absolute path, and scripts give relative ones."""
    return other is not None and os.path.realpath(path) == os.path.realpath(other)


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Remove the oldest checkpoints until `save_total_limit` remain.

    The newest one and `best_model_checkpoint` are kept whatever the limit. Nothing is removed if it is None or 0.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    removable = [path for path in ordered[:-1] if not _is_same(path, best_model_checkpoint)]
    for path in removable[: max(0, len(ordered) - save_total_limit)]:
        shutil.rmtree(path, ignore_errors=True)


def remove_dummy_checkpoint(
    is_main_process: bool, output_dir: str | os.PathLike[str], filenames: Iterable[str]
) -> None:
    """On the main process, remove these files from `output_dir`, if they are there."""
    if is_main_process:
        for name in filenames:
            Path(output_dir, name).unlink(missing_ok=True)


def compare_trainer_and_checkpoint_args(
    training_args: TrainingArguments, trainer_state: TrainerState
) -> None:
    """Warn of each setting that is another one now than in the state of a checkpoint."""
    pairs = {
        name: (getattr(training_args, name, None), getattr(trainer_state, name, None)) for name in _COMPARED
    }
    in_all = trainer_state.train_batch_size
    if in_all is not None:
        pairs["per_device_train_batch_size"] = (
            training_args.per_device_train_batch_size,
            in_all // max(1, training_args.n_gpu),
        )
    changed = [
        f"{name}={now!r} (then {then!r})"
        for name, (now, then) in pairs.items()
        if None not in (now, then) and now != then
    ]
    if changed:
        warn_once(_logger, f"settings that differ from those of the checkpoint: {', '.join(changed)}")
