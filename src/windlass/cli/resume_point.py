"""Where `windlass train` continues from, checked before data and model are prepared."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.callbacks.run_record import read_record, settings_of
from windlass.config.arguments import TrainingArguments
from windlass.config.documents import one_line
from windlass.core.errors import CheckpointError, ConfigError, DataError, Problem
from windlass.core.locations import at_home, is_url, shown_path, unwritable
from windlass.core.world import world_from_environment
from windlass.recipes.recipe import run_folder
from windlass.recipes.schema import Recipe, field_names


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint, and its step."""

    path: Path
    step: int


def find_resume_point(resume: bool | str | None, args: TrainingArguments) -> ResumePoint | None:
    """Return the checkpoint that a run continues from; None for a new run, or if only all ranks together can find it.

    Args:
        resume: True, "auto" or a path, as `Trainer.train` takes it.

    Raises:
        CheckpointError: there is none, or the one that was named is damaged. ConfigError: it is past `max_steps`.
    """
    # On several machines a rank may not see the disk of another; a remote folder is downloaded by `train()`.
    is_remote = is_url(str(args.output_path)) or is_url(str(resume))
    if not resume or is_remote or world_from_environment().machines > 1:
        return None
    which = resume if isinstance(resume, bool) or resume == "auto" else at_home(resume)
    point = _find(which, run_folder(args))
    if point is not None and 0 < args.max_steps < point.step:
        raise past_the_end(args, args.max_steps, point.step)
    return point


def past_the_end(args: TrainingArguments, last: int, step: int) -> ConfigError:
    """Return the error of a checkpoint of a later `step` than the `last` one of the run."""
    key = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    fix = f"ends at step {last}, and the checkpoint is of step {step}: raise it, or name an earlier one: --resume DIR"
    return ConfigError(Problem(f"training.{key}", getattr(args, key), fix))


def _find(which: str | bool | Path, folder: Path) -> ResumePoint | None:
    from windlass.checkpoint.foreign import find_foreign, open_foreign
    from windlass.checkpoint.store import Store, no_checkpoint

    store = Store(folder)
    if which == "auto" and store.is_fresh():
        return None
    foreign = find_foreign(store, which if isinstance(which, Path) else True)
    if foreign is not None:
        return ResumePoint(foreign, open_foreign(foreign).step)
    if isinstance(which, Path):
        info = store.resume_point(which)
        return ResumePoint(info.path, info.step)
    newest, skipped = store.newest_verified()
    if newest is None:
        reasons = "".join(f"\n  - {why}" for _, why in skipped)
        raise CheckpointError(no_checkpoint(shown_path(folder), reasons))
    return ResumePoint(newest, next(info.step for info in store.list() if info.path == newest))


def changed_keys(args: TrainingArguments, point: ResumePoint) -> Iterator[str]:
    """Yield a line on each key outside `training` whose value is not that of the run that is resumed. Nothing of a run
    whose record is missing or damaged. Changed arguments are reported by `Trainer.train`.
    """
    record = None
    with contextlib.suppress(DataError, OSError):
        record = read_record(point.path.parent)
    settings = None if record is None else record.get("settings")
    if not isinstance(settings, dict):
        return
    before = {name: one.get("value") for name, one in settings.items() if isinstance(one, dict)}
    # As the record has them: without secrets, and as values of JSON.
    now = json.loads(json.dumps({name: one["value"] for name, one in settings_of(args).items()}, default=str))
    sections = set(field_names(Recipe)) - {"training", "parallel", "sample"}
    for name in sorted(before.keys() | now.keys()):
        if name.partition(".")[0] in sections and before.get(name) != now.get(name):
            kept = "; the tokenizer of the checkpoint is kept" if name.startswith("tokenizer.") else ""
            yield f"{name}: {_value(now, name)}, and was {_value(before, name)}{kept}"
    yield from _changed_split(args, point, now)


def _changed_split(args: TrainingArguments, point: ResumePoint, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if other rows may be held out than those that the run held out so far, by another seed."""
    if {"data.eval", "data.eval_split"} & now.keys() or now.get("data.eval_fraction") == 0:
        return
    with contextlib.suppress(OSError, ValueError):
        before = json.loads((point.path / "training_args.json").read_text("utf-8")).get("seed", args.seed)
        if before != args.seed:
            yield (
                f"training.seed: {args.seed}, and was {before}; a part of the rows that is drawn for evaluation is "
                "another one, which was trained on: put it back, or name data.eval"
            )


def _value(values: Mapping[str, Any], name: str) -> str:
    return one_line(values[name]) if name in values else "its default"


def check_folder(args: TrainingArguments) -> None:
    """Raise ConfigError if the output folder cannot be written, as far as that shows without writing."""
    folder = run_folder(args).absolute()
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # a run makes it
    except OSError as error:  # below a folder that may not be searched, or of a name that is too long
        raise unwritable(str(args.output_dir), error) from error
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise unwritable(str(args.output_dir), OSError(errno.ENOTDIR, f"{existing} is a file"))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unwritable(str(args.output_dir), OSError(errno.EACCES, os.strerror(errno.EACCES)))
