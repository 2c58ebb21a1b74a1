"""Choosing the checkpoint that a run continues, and reading its progress."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from windlass.accelerator.saved_parts import reading
from windlass.assemble.rules import Progress
from windlass.checkpoint import strict_json
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.opening import open_on_all, store_of_checkpoint
from windlass.config.arguments import FREE_TO_DIFFER, TrainingArguments
from windlass.config.plan import UpdateSize
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.logs import get_job_logger
from windlass.core.script_command import Needs, needs_to_resume
from windlass.core.types import State
from windlass.data.update_batch import GroupSource
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together
from windlass.engine.splitting import Kind
from windlass.trainer.continuing import find_foreign_on_all
from windlass.trainer.run_folder import RunFolder

logger = get_job_logger(__name__)

# Arguments whose values are options in the optimizer's state, which continues as it was saved.
_OF_OPTIMIZER = frozenset({"weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"})
# Those whose values are in the state of a scheduler that counts its own steps.
_OF_SCHEDULER = frozenset({"learning_rate", "lr_scheduler_kwargs"})


class CheckpointSource:
    """Finds checkpoints, verifies them and opens them on all ranks. `manager` is that of the run's `folder`."""

    asked: str | bool | os.PathLike[str] | None = None  # the argument `resume_from_checkpoint` of the run

    def __init__(self, all_ranks: Gang, folder: RunFolder, manager: CheckpointManager) -> None:
        self._all_ranks, self.folder, self.manager = all_ranks, folder, manager

    @property
    def needs(self) -> Needs:
        """What the command of this process, typed again, needs to resume."""
        return needs_to_resume(self.asked)

    def resume_point(
        self, asked: str | bool | os.PathLike[str] | None, resolve_path: Callable[[str], str]
    ) -> Checkpoint | None:
        """The verified checkpoint that `resume_from_checkpoint` names, None for a fresh run. Collective. Raises
        ConfigError if the value is not one of those allowed, and CheckpointError if there is no such checkpoint.
        """
        self.asked = asked
        if asked is None or asked is False:
            return None
        if not isinstance(asked, (bool, str, os.PathLike)):
            fix = (
                "give True (the newest checkpoint that verifies), 'auto' (that, or a fresh start if there is none) or "
                "the path of a checkpoint"
            )
            raise ConfigError(Problem("resume_from_checkpoint", asked, fix))
        if asked == "auto":
            if self._is_fresh():
                logger.info("resume_from_checkpoint='auto': %s holds no checkpoint", self.folder.path)
                return None
            asked = True
        return self.open(True if isinstance(asked, bool) else resolve_path(os.fspath(asked)))

    def _is_fresh(self) -> bool:
        """Return True if no process finds anything to resume from, not even a damaged checkpoint, which is never
        ignored for a fresh start. Collective.
        """
        store = self.manager.store
        fresh = together(self._all_ranks, lambda: not store.is_writer or store.is_fresh())
        return all(self._all_ranks.gather_objects(fresh))

    def open(self, which: Literal[True] | str) -> Checkpoint:
        """Open a checkpoint, or the newest one that verifies; see `open_on_all`. Collective."""
        store = self.manager.store
        if which is not True and is_url(which):
            # It may be another run's, whose staging folder is not this run's.
            store, which = store_of_checkpoint(which, self._all_ranks, self.folder.disks)
        foreign = find_foreign_on_all(self._all_ranks, store, which)
        return open_on_all(store, which, self._all_ranks) if foreign is None else foreign


# --- the progress of a checkpoint's run -----------------------------------------------------------------------------


def resumed_progress(
    checkpoint: Checkpoint, source: GroupSource, accumulation: int, position: State | None
) -> Progress | None:
    """The progress before updates changed their size (batch, accumulation, ranks); None if they did not. `position` is
    where the data continues; None: at the beginning of the epoch.
    """
    if not checkpoint.has("loop"):
        return None
    loop, per_epoch = checkpoint.shared("loop"), source.groups_per_epoch(accumulation)
    with reading(checkpoint, "loop"):
        if per_epoch is None or per_epoch == loop["updates_per_epoch"]:
            return None
        left = source.groups_left(position, accumulation) if position else None
        if left is None or position is None:
            # The epoch is counted once its end was handled.
            return Progress(checkpoint.step, (loop["epoch"] + bool(loop["data_spent"])) * per_epoch)
        return Progress(checkpoint.step, (position["epoch"] + 1) * per_epoch - left)


def warn_if_complete(checkpoint: Checkpoint, steps: int, args: TrainingArguments) -> None:
    """Warn if a run that ends at update `steps` has nothing left to train after a checkpoint."""
    if checkpoint.step < steps:
        return
    by_steps = args.max_steps > 0
    name, end = ("max_steps", args.max_steps) if by_steps else ("num_train_epochs", args.num_train_epochs)
    logger.warning(
        "%s=%s ends this run at step %d, and %s is at step %d: nothing is left to train, and train() makes no update. "
        "To train on, raise %s; to train from the beginning, leave resume_from_checkpoint out",
        name,
        end,
        steps,
        checkpoint.folder,
        checkpoint.step,
        name,
    )


def warn_of_changed_arguments(
    checkpoint: Checkpoint, arguments: Mapping[str, Any], schedule_counts: bool
) -> None:
    """Warn of arguments that differ from those of the checkpoint, and say which value holds. For the main process.

    Args:
        schedule_counts: the schedule's state is more than the number of the update.
    """
    text = checkpoint.read("training_args.json")
    if text is None:
        return
    old = strict_json.parse(text, f"{checkpoint.folder / 'training_args.json'}", allow_nan=True)
    # As the saved ones were written, so that equal values are equal here.
    new = json.loads(json.dumps(arguments, default=str))
    changed = [name for name in sorted(new.keys() & old.keys()) if new[name] != old[name]]
    of_state = _OF_OPTIMIZER | (_OF_SCHEDULER if schedule_counts else frozenset())

    def warn(what: str, names: Iterable[str]) -> None:
        lines = [
            f"{name}: {new[name]} (from args) != {old[name]} (from {checkpoint.folder.name})"
            for name in names
        ]
        if lines:
            logger.warning(
                "arguments that differ from the checkpoint's, and %s:\n  %s", what, "\n  ".join(lines)
            )

    warn("replace them", (name for name in changed if name not in FREE_TO_DIFFER | of_state))
    warn(
        "have no effect, because the optimizer's and the schedule's state continue with the saved ones",
        (name for name in changed if name in of_state),
    )


def saved_update_size(checkpoint: Checkpoint) -> UpdateSize | None:
    """The size of the updates of a checkpoint's run; None if it does not hold one."""
    saved = checkpoint.meta.get("update_size")
    if saved is None:
        return None
    with reading(checkpoint, "manifest"):
        size = UpdateSize.from_dict(saved)
        if any(type(n) is not int or n < 1 for n in (size.micro, size.accumulation, size.ranks, size.asked)):
            raise ValueError(f"an update is made of {saved}")
    return size


def saved_loss(checkpoint: Checkpoint) -> State:
    """The facts of `LossPolicy` in a checkpoint. Earlier versions saved some of them."""
    with reading(checkpoint, "manifest"):
        saved = checkpoint.meta.get("loss", {"over": checkpoint.meta.get("loss_over")})
        names = ("shifted", "gets_count", "complete", "without_logits")
        flags = {n: saved[n] for n in names if isinstance(saved.get(n), bool)}
        return {"over": Kind[saved["over"]].name if saved.get("over") else None, **flags}


def saved_position(checkpoint: Checkpoint | None) -> State | None:
    """The position of a checkpoint's run in its data; None for a fresh run, or one that another program began."""
    if checkpoint is None or isinstance(checkpoint, ForeignCheckpoint) or not checkpoint.has("loop"):
        return None
    with reading(checkpoint, "loop"):
        position: State = checkpoint.shared("loop")["position"]
        return position or None


def check_same_loader(checkpoint: Checkpoint, position: State, *, dealt: bool) -> None:
    """Raise CheckpointError if a position is one in the data of another kind of loader. `dealt`: Windlass deals the
    samples of this run, not a loader of the script.
    """
    was_dealt = "batches" not in position  # the unit of a script's loaders
    if was_dealt is not dealt:
        kinds = {True: "one of Windlass", False: "one of the script"}
        raise CheckpointError(
            f"{checkpoint.folder} has the position of another kind of loader, {kinds[was_dealt]}, and this run reads "
            f"with {kinds[dealt]}: return the same from get_train_dataloader, or set ignore_data_skip=True to begin "
            "the epoch again"
        )


def merged_ledger(ledgers: list[State], mine: bool) -> State:
    """One rank's ledger from those of all: counts are the same on all ranks, sums go to the first (`mine`)."""
    scale = float(mine)
    parts = [ledger["parts"] for ledger in ledgers]
    names = {name for part in parts for name in part}
    return {
        **ledgers[0],
        **{name: sum(ledger[name] for ledger in ledgers) * scale for name in ("loss", "skipped_loss")},
        "parts": {name: sum(part[name] for part in parts if name in part) * scale for name in names},
    }
