"""Restoring a run: from the checkpoint that it continues, from its best one, and from its newest one to roll back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from windlass.accelerator.saved_parts import reading, same_ranks
from windlass.checkpoint.foreign import format_of
from windlass.checkpoint.history import checked_state, complete_state
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.store import is_checkpoint
from windlass.checkpoint.stored import load_folder
from windlass.core.errors import CheckpointError, NonFiniteError
from windlass.core.events import TrainerState
from windlass.core.logs import get_job_logger
from windlass.core.threads import warn_of_other_threads
from windlass.core.types import State
from windlass.trainer.resuming import CheckpointSource
from windlass.trainer.run_checkpoints import RunCheckpoints
from windlass.trainer.run_context import RunContext

logger = get_job_logger(__name__)
_MAX_ROLLBACKS = 3  # to the same checkpoint; data that is skipped three times in vain is not the cause


class RunRestorer:
    """Restores a run from its checkpoints, or rolls it back.

    Attributes:
        continued: the verified checkpoint that the run continues; None for a fresh run.

    Args:
        opener: opens checkpoints; of the run's folder.
        checkpoints: what it has saved, with the list of its parts.
    """

    def __init__(self, context: RunContext, opener: CheckpointSource, checkpoints: RunCheckpoints) -> None:
        self._context, self._opener, self._checkpoints = context, opener, checkpoints
        self._all_ranks, self._events = context.all_ranks, context.events
        self.continued: Checkpoint | None = None

    def load_weights(self, folder: Path, model: nn.Module) -> None:
        """Load the weights of the checkpoint that is continued, or of another folder."""
        if self.continued is not None and folder == self.continued.folder:
            self.continued.load_weights(model)
        else:
            load_folder(folder, model)

    def restore(self, checkpoint: Checkpoint, restore_callback_args: bool) -> None:
        """Continue from a checkpoint whose weights are in the model; raise CheckpointError if a part does not fit."""
        if not checkpoint.has("optimizer"):
            raise CheckpointError(
                f"{checkpoint.folder} holds only the model (it was saved with save_only_model=True), so a run can't "
                "continue from it. Start a new run from its weights: load them into the model and call train()"
            )
        self._restore(checkpoint, restore_callback_args, rolling_back=False)
        warn_of_other_threads(checkpoint.meta, self._context.session.device.type, checkpoint.folder)
        self._checkpoints.newest, self._checkpoints.rollbacks = checkpoint.folder, 0
        logger.info("continuing from %s at step %d", checkpoint.folder, checkpoint.step)

    def _restore(self, checkpoint: Checkpoint, restore_callback_args: bool, rolling_back: bool) -> None:
        if not same_ranks(checkpoint, self._all_ranks):
            logger.warning(
                "%s was saved by %d process(es), this run has %d, or another layout of them: the order of samples is "
                "unchanged, but the bits of dropout and of sums over ranks differ",
                checkpoint.folder,
                checkpoint.world_size,
                self._all_ranks.size,
            )
        self._events.adopt(saved_state(checkpoint))
        self._checkpoints.history.resume(checkpoint, self._events.state.log_history)
        self.find_best(checkpoint)
        checkpoint.load_optimizer(self._context.built.executor.optimizer, self._context.files.model)
        self._events.restore_callbacks(restore_callback_args)
        for part in self._checkpoints.parts:
            if part.rolls_back or not rolling_back:
                part.load(checkpoint, self._all_ranks)

    def find_best(self, checkpoint: Checkpoint) -> None:
        """Find the best checkpoint, whose folder may have been moved; raise CheckpointError if it is gone and the run
        needs it at its end.
        """
        self._checkpoints.best.resume(checkpoint.step, checkpoint.meta.get("metric"))
        noted = self._events.state.best_model_checkpoint
        if noted is None:
            return
        name, folder = Path(noted).name, self._opener.folder.path
        places = [folder / name, checkpoint.folder.parent / name]
        # A relative path was relative to another working directory, maybe.
        places.insert(0 if Path(noted).is_absolute() else 2, Path(noted))
        store = self._opener.manager.store
        found = next((place for place in places if store.is_committed(place) or format_of(place)), None)
        if found is not None:
            self._checkpoints.best.moved(found)
        elif self._context.plan.save.load_best_at_end:
            raise CheckpointError(
                f"the best checkpoint so far ({noted}) is gone, and load_best_model_at_end=True needs it: put it into "
                f"{folder}, or resume with load_best_model_at_end=False"
            )

    def load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model, verified."""
        best = self._events.state.best_model_checkpoint
        if best is None:
            logger.warning(
                "load_best_model_at_end: no evaluation found a best model; keeping the last weights"
            )
            return
        checkpoint = self._opener.open(best)
        checkpoint.load_weights(self._context.files.model)
        logger.info("loaded the best model, of step %d: %s", checkpoint.step, checkpoint.folder)

    def roll_back(self, what: str, position: State) -> dict[str, Any]:
        """Restore everything but the position in the data from the run's newest checkpoint. Collective.

        The data between that checkpoint and the refused update, which led to the non-finite values, is skipped. Updates
        made from it are undone, with their logs.

        Args:
            what: a description of where the non-finite values appeared.
            position: the present position in the data.

        Returns:
            A row for the log.

        Raises:
            NonFiniteError: this run has no checkpoint yet, or rolling back to it several times has not helped.
        """
        self._checkpoints.finish()  # the save under way is newer than what is committed
        refused = self._events.state.global_step
        if self._checkpoints.newest is None:
            raise NonFiniteError(
                f"{what}, and this run has saved no checkpoint yet to roll back to; save more often"
            )
        if self._checkpoints.rollbacks >= _MAX_ROLLBACKS:
            raise NonFiniteError(
                f"{what}, again: rolling back to {self._checkpoints.newest.name} {_MAX_ROLLBACKS} times has not helped"
            )
        exists = self._all_ranks.vote(is_checkpoint(self._checkpoints.newest))
        # A limit that keeps only the best may have removed the newest.
        checkpoint = self._opener.open(str(self._checkpoints.newest) if exists else True)
        checkpoint.load_weights(self._context.files.model)
        self._restore(checkpoint, restore_callback_args=False, rolling_back=True)
        self._events.roll_back_metrics_log()
        self._checkpoints.rollbacks += 1
        event: dict[str, Any] = {
            "rolled_back_from": refused,
            "rolled_back_to": checkpoint.step,
            "updates_undone": refused - checkpoint.step - 1,  # the refused one was not applied
        }
        skipped = samples_between(checkpoint.shared("loop")["position"], position)
        if skipped is not None:
            event["samples_left_out"] = skipped
        logger.warning(
            "%s; rolled back to step %d, undid %d updates and skipped their data%s",
            what,
            checkpoint.step,
            event["updates_undone"],
            "" if skipped is None else f" ({skipped} samples)",
        )
        return {**event, "reason": what}


def saved_state(checkpoint: Checkpoint) -> TrainerState:
    """The saved state of a run, with its whole history; raise CheckpointError if it is damaged."""
    saved = checked_state(checkpoint.folder / "trainer_state.json", complete_state(checkpoint))
    with reading(checkpoint, "trainer_state"):
        state = TrainerState.from_dict(saved)
        if state.global_step != checkpoint.step:
            raise ValueError(f"it is of step {state.global_step}")
    return state


def samples_between(start: State, end: State) -> int | None:
    """Samples over all ranks between two positions of a loader; None if positions are not counted in samples."""
    if not {"epoch", "consumed"} <= start.keys() & end.keys() or start.get("unit", "samples") != "samples":
        return None
    passes = end["epoch"] - start["epoch"]
    if passes and start.get("length") is None:
        return None
    return int(end["consumed"] - start["consumed"] + passes * (start.get("length") or 0))
