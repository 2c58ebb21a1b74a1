"""Choosing the checkpoint that a run continues, and what it says of that run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from windlass.assemble.batch import UpdateSize
from windlass.assemble.facts import Progress
from windlass.checkpoint import strict_json
from windlass.checkpoint.foreign import ForeignCheckpoint, checked_state
from windlass.checkpoint.history import complete_state
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.opening import open_on_all, store_of_checkpoint
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.events import TrainerState
from windlass.core.locations import is_url
from windlass.core.logs import get_job_logger
from windlass.core.types import State
from windlass.data.group import GroupSource
from windlass.trainer.continuing import find_foreign_on_all
from windlass.trainer.run_folder import RunFolder
from windlass.trainer.saved_parts import reading
from windlass.trainer.session import Session

logger = get_job_logger(__name__)

# Arguments in which a resumed run may differ from the checkpoint's without a word.
_FREE_TO_DIFFER = frozenset(
    {"output_dir", "resume_from_checkpoint", "disable_tqdm", "log_level", "log_level_replica"}
)


class CheckpointSource:
    """Finds checkpoints, verifies them and opens them on all ranks.

    Args:
        manager: of the run's folder.
    """

    def __init__(self, session: Session, folder: RunFolder, manager: CheckpointManager) -> None:
        self._session, self._gang, self._folder, self._manager = session, session.gang, folder, manager

    def resume_point(
        self, asked: str | bool | os.PathLike[str] | None, resolve_path: Callable[[str], str]
    ) -> Checkpoint | None:
        """The verified checkpoint that `resume_from_checkpoint` asks for, None for a fresh run. Collective.

        Raises:
            ConfigError, CheckpointError: it asks for nothing that is known, or that is there.
        """
        if asked is None or asked is False:
            return None
        if not isinstance(asked, (bool, str, os.PathLike)):
            fix = (
                "give True (the newest checkpoint that verifies), 'auto' (that, or a fresh start where there is "
                "none) or the path of a checkpoint"
            )
            raise ConfigError(Problem("resume_from_checkpoint", asked, fix))
        if asked == "auto":
            if self._is_fresh():
                logger.info("resume_from_checkpoint='auto': %s holds no checkpoint", self._folder.path)
                return None
            asked = True
        return self.open(True if isinstance(asked, bool) else resolve_path(os.fspath(asked)))

    def _is_fresh(self) -> bool:
        """Whether no process finds anything to resume from, not even something damaged: that is never passed over for
        a fresh start. Collective.
        """
        store, fresh, problem = self._manager.store, True, None
        try:
            fresh = not store.is_writer or store.is_fresh()
        except CheckpointError as error:
            problem = str(error)
        told = self._gang.gather_objects([fresh, problem])
        problems = [why for _, why in told if why is not None]
        if problems:
            raise CheckpointError(problems[0])
        return all(alone for alone, _ in told)

    def open(self, which: Literal[True] | str) -> Checkpoint:
        """A checkpoint, True being the newest one that verifies. Collective: the main process chooses and verifies for
        all, so nothing is hashed twice. If there are several disks, one process of each does.
        """
        manager = self._manager
        if which is not True and is_url(which):
            # It may be another run's: the folder that stands for that one is not this run's.
            store, which = store_of_checkpoint(which, self._gang, self._folder.disks)
            manager = CheckpointManager(store)
        foreign = find_foreign_on_all(self._gang, manager.store, which)
        if foreign is not None:
            return foreign
        return open_on_all(manager, which, self._gang)


# --- what a checkpoint says of its run ------------------------------------------------------------------------------


def resumed_progress(checkpoint: Checkpoint, source: GroupSource, accumulation: int) -> Progress | None:
    """What was done before an update changed its size (batch, accumulation, ranks); None if it did not."""
    if not checkpoint.has("loop"):
        return None
    loop, per_epoch = checkpoint.shared("loop"), source.groups_per_epoch(accumulation)
    with reading(checkpoint, "loop"):
        position = loop["position"]
        if per_epoch is None or per_epoch == loop["updates_per_epoch"]:
            return None
        left = source.groups_left(position, accumulation) if position else None
        if left is None:
            return Progress(checkpoint.step, loop["epoch"] * per_epoch)
        return Progress(checkpoint.step, (position["epoch"] + 1) * per_epoch - left)


def warn_of_changed_arguments(checkpoint: Checkpoint, arguments: Mapping[str, Any]) -> None:
    """Warn of arguments that differ from those of the checkpoint. For the main process."""
    text = checkpoint.read("training_args.json")
    if text is None:
        return
    old = strict_json.parse(text, f"{checkpoint.folder / 'training_args.json'}", allow_nan=True)
    new = json.loads(json.dumps(arguments, default=str))
    changed = [
        f"{name}: {new[name]} (from args) != {old[name]} (from {checkpoint.folder.name})"
        for name in sorted(new.keys() & old.keys())
        if new[name] != old[name] and name not in _FREE_TO_DIFFER
    ]
    if changed:
        logger.warning(
            "these arguments differ from the checkpoint's, and the new ones hold:\n  %s",
            "\n  ".join(changed),
        )


def saved_state(checkpoint: Checkpoint) -> TrainerState:
    """The state of a run as it was saved, with its whole history.

    Raises:
        CheckpointError: it is damaged, or of another step.
    """
    saved = checked_state(checkpoint.folder / "trainer_state.json", complete_state(checkpoint))
    with reading(checkpoint, "trainer_state"):
        state = TrainerState.from_dict(saved)
        if state.global_step != checkpoint.step:
            raise ValueError(f"it is of step {state.global_step}")
    return state


def saved_update_size(checkpoint: Checkpoint) -> UpdateSize | None:
    """What the updates of a checkpoint's run were made of; None if it does not say.

    Raises:
        CheckpointError: it says something else.
    """
    saved = checkpoint.meta.get("update_size")
    if saved is None:
        return None
    with reading(checkpoint, "manifest"):
        size = UpdateSize(**saved)
        if any(type(n) is not int or n < 1 for n in (size.micro, size.accumulation, size.world, size.asked)):
            raise ValueError(f"an update is made of {saved}")
    return size


def saved_position(checkpoint: Checkpoint | None) -> State | None:
    """Where a checkpoint's run was in its data; None for a fresh run, or one that another program began."""
    if checkpoint is None or isinstance(checkpoint, ForeignCheckpoint) or not checkpoint.has("loop"):
        return None
    with reading(checkpoint, "loop"):
        position: State = checkpoint.shared("loop")["position"]
        return position or None


def merged_ledger(ledgers: list[State], mine: bool) -> State:
    """One rank's ledger made of several: sums go to the first rank, counts to all."""
    first = dict(ledgers[0])
    for name in ("loss", "skipped_loss"):
        first[name] = sum(ledger[name] for ledger in ledgers) * float(mine)
    names = {name for ledger in ledgers for name in ledger["parts"]}
    first["parts"] = {
        name: sum(ledger["parts"][name] for ledger in ledgers if name in ledger["parts"]) * float(mine)
        for name in names
    }
    return first
