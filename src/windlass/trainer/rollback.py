"""Going back to the last checkpoint when gradients become non-finite, and on without the data that led there."""

from __future__ import annotations

from typing import Any

from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.store import is_checkpoint
from windlass.core.errors import NonFiniteError
from windlass.core.logs import get_job_logger
from windlass.core.types import State
from windlass.trainer.parts import TrainerParts
from windlass.trainer.resuming import saved_state

logger = get_job_logger(__name__)
_PATIENCE = 3


def roll_back(trainer: TrainerParts, what: str) -> None:
    """Put everything but the position in the data back to the run's newest checkpoint. Every rank calls it.

    The data between that checkpoint and the refused update is not seen again: it is the window that led to the
    non-finite values. Updates made from it are undone, with their logs.

    Args:
        what: where the non-finite values came up, in words.

    Raises:
        NonFiniteError: there is no checkpoint of this run yet, or going back to it has not helped.
    """
    trainer._finish_saving()  # what is being saved is newer than what stands
    refused = trainer.state.global_step
    if trainer._newest_checkpoint is None:
        raise NonFiniteError(
            f"{what}, and this run has saved no checkpoint yet to roll back to; save more often"
        )
    if trainer._rollbacks >= _PATIENCE:
        folder = trainer._newest_checkpoint.name
        raise NonFiniteError(f"{what}, again: going back to {folder} {_PATIENCE} times has not helped")
    stands = trainer._gang.vote(is_checkpoint(trainer._newest_checkpoint))
    # A limit that keeps the best alone may have removed the newest.
    checkpoint = trainer._open_checkpoint(str(trainer._newest_checkpoint) if stands else True)
    checkpoint.load_weights(trainer.model)
    assert trainer.optimizer is not None, "a run that steps has an optimizer"
    checkpoint.load_optimizer(trainer.optimizer, trainer.model)
    run = trainer._run
    run.schedule.load_state_dict(checkpoint.shared("schedule"))
    run.executor.load_state_dict(checkpoint.shared("executor"))
    trainer._adopt_state(saved_state(checkpoint))
    run.saver.history.resume(checkpoint, trainer.state.log_history)
    trainer._find_best(checkpoint)
    trainer.callback_handler.load_state_dict(trainer.state.stateful_callbacks, restore_args=False)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, MetricsLogCallback):
            callback.roll_back(trainer.state)
    trainer._restore_rank(checkpoint)
    trainer._rollbacks += 1
    _report(trainer, what, refused, checkpoint)


def _report(trainer: TrainerParts, what: str, refused: int, checkpoint: Checkpoint) -> None:
    event: dict[str, Any] = {
        "rolled_back_from": refused,
        "rolled_back_to": checkpoint.step,
        "updates_undone": refused - checkpoint.step - 1,
    }
    skipped = samples_between(checkpoint.shared("loop")["position"], trainer._run.loop.position)
    if skipped is not None:
        event["samples_left_out"] = skipped
    logger.warning(
        "%s; went back to step %d and on behind that data, undoing %d updates%s",
        what, checkpoint.step, event["updates_undone"],
        "" if skipped is None else f" and leaving out {skipped} samples",
    )  # fmt: skip
    trainer.log({**event, "reason": what})


def samples_between(start: State, end: State) -> int | None:
    """Samples over all ranks from one position of a loader to a later one; None where they tell no samples."""
    if not {"epoch", "consumed"} <= start.keys() & end.keys() or start.get("unit", "samples") != "samples":
        return None
    passes = end["epoch"] - start["epoch"]
    if passes and start.get("length") is None:
        return None
    return int(end["consumed"] - start["consumed"] + passes * (start.get("length") or 0))
