"""The training loop: when things happen. The executor computes each update, and the hooks react to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from windlass.core.errors import NonFiniteError
from windlass.core.events import RunProgress
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.rng import StepSeeder
from windlass.core.run_clock import COMPUTE, run_clock
from windlass.core.types import State
from windlass.data.update_batch import UpdateBatch
from windlass.dist.beacon import AFTER, beacon
from windlass.engine.executor import Executor, StepHooks, StepResult
from windlass.engine.feed import Feed, FeedHooks
from windlass.metrics.ledger import FiniteWatch, Ledger

logger = get_job_logger(__name__)


@dataclass(slots=True)
class Suspect:
    """An update that may be found to be non-finite later."""

    step: int  # its number, from 1
    data: UpdateBatch  # its data on this rank
    losses: Sequence[Tensor]  # this rank's loss of each micro-batch; may still be under way on the device
    applied: bool  # it was applied, so its gradient norm counts, which is the same on all ranks


class LoopHooks(FeedHooks):
    """What is done at the events of the loop while it runs."""

    steps: StepHooks  # what an update calls

    def epoch_begin(self, resumed: bool) -> None:
        """Called when the run enters an epoch; `resumed` if another process had begun it."""

    def data_ahead(self) -> None:
        """Called before the data of the next update is requested."""

    def too_large(self, error: Exception) -> bool:
        """Return True to retry an update that failed with `error` in smaller micro-batches; may raise a better error
        instead.
        """
        return False

    def shrink(self) -> int:
        """Restore what that update changed, and make micro-batches smaller. Return the new number of micro-batches per
        update.
        """
        raise NotImplementedError

    def step_begin(self, step: int) -> None:
        """Called before update `step`, counted from 0: set its learning rate."""

    def step_end(self, batch: UpdateBatch, applied: bool) -> None:
        """Called after the update of this data was applied or skipped, and not rolled back. Apply the signals of all
        ranks; log, evaluate and save, as the control flags request.
        """

    def epoch_end(self, complete: bool) -> None:
        """Called when the run leaves an epoch; `complete` unless the run stops with data of the epoch left. Log,
        evaluate and save, as the control flags request.
        """

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        """Called on every rank after an update was refused because its gradients were not finite.

        Return True if the run was rolled back to a checkpoint: its progress is then that of the checkpoint, and the
        signals of all ranks were applied.
        """
        return False


def describe(suspect: Suspect) -> str:
    """Describe what this rank knows of an update that is not finite."""
    return nonfinite_at(suspect.step, suspect.data.ids)


@dataclass(slots=True)
class LoopOptions:
    epochs: int
    max_grad_norm: float | None
    # Wait for each update's norm and refuse the update if it is not finite, instead of stopping the run
    guard: bool
    restart_epoch: bool = False  # a resumed run reads the epoch from its first sample again
    # Describes the source of the non-finite values of an update, of any rank. Every rank calls it
    explain: Callable[[Suspect], str] = describe


class Loop:
    """Runs updates until the `max_steps` of the state of `progress`, the last epoch, or a callback's stop.

    `state_dict` holds the progress between two updates. With the states of model, optimizer, schedule and ledger it
    is all that a run needs to continue with the same bits.
    """

    def __init__(
        self,
        executor: Executor,
        feed: Feed,
        progress: RunProgress,
        ledger: Ledger,
        seed_step: StepSeeder,
        options: LoopOptions,
    ) -> None:
        self._executor, self._feed = executor, feed
        self._progress, self._state = progress, progress.state
        self._ledger, self._seed_step, self._options = ledger, seed_step, options
        self._watch = FiniteWatch(ledger.device)
        self._beacon, self._clock = beacon(), run_clock()
        self._epoch = 0
        self._updates_in_epoch = 0
        self._position: State = {}
        self._own_position: State | None = None
        self._epoch_open = False
        self._data_spent = False
        self._extra_epochs = 0
        self._updates_per_epoch: int | None = None

    def run(self, hooks: LoopHooks) -> None:
        """Run until the end of training. `hooks` are those of this call, and not kept."""
        # Gradients left by a script's own backward or by an interrupted run would be added to the first update.
        self._executor.zero_grad()
        while not self._finished():
            self._run_epoch(hooks)
        self.check_finite()
        control, done, planned = self._progress.control, self._state.global_step, self._state.max_steps
        if done < planned and not (control.should_training_stop or control.should_epoch_stop):
            logger.warning(
                "the data ended after %d of %d updates: its loader has fewer batches than its length says, or a "
                "callback ended epochs; the learning rate was that of a run of all of them",
                done,
                planned,
            )
        self._beacon.call(f"{AFTER}training")

    def _run_epoch(self, hooks: LoopHooks) -> None:
        resumed, self._epoch_open = self._epoch_open, True
        if not resumed:
            self._progress.control.should_epoch_stop = False  # which a callback set in the last one
        hooks.epoch_begin(resumed)
        before = self._updates_in_epoch
        self._updates_per_epoch = self._feed.groups_per_epoch
        with contextlib.closing(self._feed):
            # A run that was resumed after the last update of an epoch, or after a stop, makes no update in it.
            while not (self._data_spent or self._leaves_epoch()):
                self.waits_for_data = True
                try:
                    hooks.data_ahead()
                    batch = self._feed.take(self._epoch, hooks)
                finally:
                    self.waits_for_data = False
                if batch is None:
                    break
                self._update(batch, hooks)
        # A callback may have ended the epoch, or the run, before its first update.
        if self._updates_in_epoch == before == 0 and not self._leaves_epoch():
            self._progress.control.should_training_stop = True
            logger.warning("epoch %d has no data for an update: training stops", self._epoch)
        self._close_epoch(hooks)

    # True while nothing would be lost if the process exited. Read by signal handlers, at any instant.
    waits_for_data = False

    def _close_epoch(self, hooks: LoopHooks) -> None:
        if self._progress.control.should_epoch_stop:
            # A callback ended the epoch early: the rest of its data is skipped.
            self._position = {}
        # Before the events: what they save continues with the next epoch.
        self._epoch_open = False
        complete = not self.stops_within_epoch
        if complete:
            self._data_spent = False
            self._epoch += 1
            self._updates_in_epoch = 0
        hooks.epoch_end(complete)

    def _update(self, batch: UpdateBatch, hooks: LoopHooks) -> None:
        """One optimizer update: group -> gradients -> update -> ledger -> events."""
        state = self._state
        step = state.global_step
        if self._clock.kind != COMPUTE:  # the first one; the update before ended in it
            self._clock.enter(COMPUTE)
        self._beacon.call("forward and backward", step)
        self._seed_step(step)
        hooks.step_begin(step)
        batch, result = self._compute(batch, hooks)
        state.global_step += 1
        self._updates_in_epoch += 1
        self._position, self._data_spent = batch.position, batch.last
        # Of a stream of unknown length the run as a whole counts as one pass.
        per_epoch = self._updates_per_epoch or state.max_steps
        state.epoch = self._epoch + (1.0 if batch.last else self._updates_in_epoch / per_epoch)
        loss = self._ledger.add(result.loss, result.norm, result.parts, result.applied)
        if self._executor.dispatch is not None:
            self._executor.dispatch()
        rolled_back = self._rolled_back(batch, result, loss, hooks)
        self._clock.update_ends(state.global_step, result.applied and not rolled_back)
        if rolled_back:
            return
        hooks.step_end(batch, result.applied)

    def _compute(self, batch: UpdateBatch, hooks: LoopHooks) -> tuple[UpdateBatch, StepResult]:
        """Compute the update; if memory runs out, retry with the same samples in smaller micro-batches."""
        options = self._options
        while True:
            try:
                return batch, self._executor.run_step(
                    batch, hooks.steps, max_norm=options.max_grad_norm, guard=options.guard
                )
            except Exception as error:
                if not hooks.too_large(error):
                    step = self._state.global_step + 1
                    error.add_note(f"raised in the update of step {step}{_samples(batch.ids)}")
                    raise
            # Outside the handler, whose traceback keeps the memory of the failed attempt alive.
            batch = self._feed.again(hooks.shrink(), hooks)
            self._seed_step(self._state.global_step)

    # --- when to stop -----------------------------------------------------------------------------------------------

    def _leaves_epoch(self) -> bool:
        control = self._progress.control
        return (
            control.should_training_stop
            or control.should_epoch_stop
            or self._state.global_step >= self._state.max_steps
        )

    @property
    def epoch_ends(self) -> bool:
        """`LoopHooks.epoch_end` follows without a further update."""
        return self._epoch_open and (self._data_spent or self._leaves_epoch())

    @property
    def stops_within_epoch(self) -> bool:
        """The run ends here and the epoch does not: a checkpoint saved now must continue with the rest of its data."""
        ended = self._data_spent or self._progress.control.should_epoch_stop
        return self._leaves_epoch() and not ended

    def _finished(self) -> bool:
        if self._epoch_open:
            return False
        stop = self._progress.control.should_training_stop or self._state.global_step >= self._state.max_steps
        return stop or self._epoch >= self._options.epochs + self._extra_epochs

    # --- non-finite values ------------------------------------------------------------------------------------------

    def _rolled_back(
        self, batch: UpdateBatch, result: StepResult, loss: Tensor | float, hooks: LoopHooks
    ) -> bool:
        """Check the update for non-finite values; return True if the run was rolled back because of them. `loss` is
        what the ledger added.
        """
        suspect = Suspect(self._state.global_step, batch, result.losses, result.applied)
        if not result.applied and not batch.denominator:
            warn_once(
                logger, "updates whose data holds no target on any rank are skipped, and counted as skipped"
            )
            return False
        if self._options.guard:
            if result.applied or not hooks.update_refused(suspect, result):
                return False
            # The data continues after the refused update, so the undone updates need more data at the end.
            self._extra_epochs += 1
            return True
        found = self._watch.add(loss, result.norm if result.applied else result.loss, suspect)
        if found is not None:
            self._raise(found)
        return False

    def check_finite(self) -> None:
        """Raise if the last update was not finite. Waits for the device: called before saving, and at the end."""
        found = self._watch.flush()
        if found is not None:
            self._raise(found)

    def _raise(self, found: tuple[Suspect, float, float]) -> None:
        suspect, loss, norm = found
        # The norm is the same on all ranks, so all reach this line. Other ranks do not know the loss of one rank.
        explain = self._options.explain if suspect.applied and not math.isfinite(norm) else describe
        what = explain(suspect)
        raise NonFiniteError(
            f"{what}: loss {loss}, gradient norm {norm}. Nothing was saved after it. Resume from the last checkpoint "
            "with a lower learning rate, correct those samples, or set nonfinite_policy to 'skip' or 'rollback'"
        )

    @property
    def position(self) -> State:
        """Where this rank's data continues; ranks with their own loaders are at different positions."""
        return self._position

    def continue_from(self, position: State) -> None:
        """Set where this rank's data continues. Call it before `load_state_dict`, which holds the main process's."""
        self._own_position = position

    # --- state ------------------------------------------------------------------------------------------------------

    def _restart_epoch(self) -> None:
        if self._updates_in_epoch:
            logger.warning(
                "epoch %d begins again, as ignore_data_skip asks: the samples of its first %d update(s) come twice",
                self._epoch,
                self._updates_in_epoch,
            )
        self._position, self._updates_in_epoch = {}, 0

    def state_dict(self) -> State:
        return {
            "epoch": self._epoch,
            "updates_in_epoch": self._updates_in_epoch,
            "updates_per_epoch": self._updates_per_epoch,
            "epoch_open": self._epoch_open,
            "data_spent": self._data_spent,
            "epoch_stopped": self._epoch_open and self._progress.control.should_epoch_stop,
            "position": self._position,
            "extra_epochs": self._extra_epochs,
        }

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._updates_in_epoch = state["epoch"], state["updates_in_epoch"]
        self._epoch_open, self._data_spent = state["epoch_open"], state["data_spent"]
        own, self._own_position = self._own_position, None
        self._position, self._extra_epochs = state["position"] if own is None else own, state["extra_epochs"]
        self._progress.control.should_epoch_stop = state["epoch_stopped"]
        if self._options.restart_epoch and not self._data_spent:
            self._restart_epoch()
        self._feed.restore(self._position)
        within = self._position and not self._data_spent
        if within and self._feed.groups_per_epoch != state["updates_per_epoch"]:
            # Updates have another size now: count the consumed data in the new size.
            consumed = self._feed.groups_consumed(self._position)
            self._updates_in_epoch = self._updates_in_epoch if consumed is None else consumed


def nonfinite_at(step: int, ids: list[list[int]]) -> str:
    """Describe what happened. `ids` are the samples of the update, by micro-batch; empty if unknown."""
    return f"loss or gradient became non-finite at step {step}{_samples(ids)}"


def _samples(ids: list[list[int]]) -> str:
    named = [index for batch in ids for index in batch]
    shown = ", ".join(map(str, named[:16])) + (f" and {len(named) - 16} more" if len(named) > 16 else "")
    return f" (samples {shown})" if named else ""
