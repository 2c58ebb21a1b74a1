"""The training loop: when things happen. How an update is made is the executor's, what follows from it the hooks'."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from windlass.core.errors import NonFiniteError
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.logs import get_logger, warn_once
from windlass.core.rng import StepSeeder
from windlass.core.types import State
from windlass.data.group import Group
from windlass.dist.beacon import AFTER, beacon
from windlass.engine.executor import Executor, StepHooks, StepRequest, StepResult
from windlass.engine.feed import Feed, UpdateBatch
from windlass.metrics.ledger import FiniteWatch, Ledger

logger = get_logger(__name__)


@dataclass(slots=True)
class Suspect:
    """An update that may turn out not to be finite.

    Attributes:
        step: its number, from 1.
        group: this rank's data of it.
        losses: this rank's loss of each micro-batch; may still be under way on the device.
        applied: it was made, so its gradient norm counts, which is the same on all ranks.
    """

    step: int
    group: Group
    losses: Sequence[Tensor]
    applied: bool


class LoopHooks(StepHooks, Protocol):
    """What the loop's owner does at its events. `control` may be replaced by them, so it is asked for each time."""

    @property
    def control(self) -> TrainerControl: ...

    def epoch_begin(self) -> None: ...

    def data_ahead(self) -> None:
        """The data of the next update is about to be asked for."""
        ...

    def step_begin(self) -> None: ...

    def too_large(self, error: Exception) -> bool:
        """An update broke off with `error`. Gives whether it shall be tried again in smaller micro-batches; may raise a
        better error instead.
        """
        ...

    def shrink(self) -> int:
        """Put back what that update changed, and cut the data smaller; gives the number of micro-batches of an update
        from now on.
        """
        ...

    def step_end(self) -> None: ...

    def epoch_end(self, complete: bool) -> None:
        """Called where the run leaves an epoch; `complete` unless the run stops with data of it left."""
        ...

    def due(self) -> None:
        """Log, evaluate and save, as far as the control flags ask for it."""
        ...

    def set_learning_rate(self, step: int) -> None: ...

    def update_applied(self, portion: UpdateBatch, applied: bool) -> None:
        """One update was made from this data, or skipped."""
        ...

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        """An update was not made, because its gradients were not finite. Every rank calls it.

        Gives whether the run went back to a checkpoint: its progress is then that of the checkpoint.
        """
        ...

    def explain_nonfinite(self, suspect: Suspect) -> str:
        """Where the values of an update that are not finite come from, on all ranks, in words. Every rank calls it."""
        ...

    def signals_agreed(self, signals: Sequence[float]) -> None:
        """What the ranks told each other: known to all of them with this update."""
        ...


@dataclass(slots=True)
class LoopOptions:
    """`guard`: wait for each update's norm and refuse it where it is not finite, instead of stopping the run."""

    epochs: int
    max_grad_norm: float | None
    guard: bool


class Loop:
    """Runs updates until the state's `max_steps`, the last epoch, or a callback's stop.

    `state_dict` holds where it stands between two updates; with the states of model, optimizer, schedule and ledger
    it is all that a run needs to go on with the same bits.
    """

    def __init__(
        self,
        executor: Executor,
        feed: Feed,
        hooks: LoopHooks,
        state: TrainerState,
        ledger: Ledger,
        watch: FiniteWatch,
        seed_step: StepSeeder,
        options: LoopOptions,
    ) -> None:
        self._executor, self._feed, self._hooks = executor, feed, hooks
        self._state, self._ledger, self._watch, self._seed_step = state, ledger, watch, seed_step
        self._options = options
        self._beacon = beacon()
        self._epoch = 0
        self._updates_in_epoch = 0
        self._position: State = {}
        self._own_position: State | None = None
        self._epoch_open = False
        self._data_spent = False
        self._extra_epochs = 0
        self._updates_per_epoch: int | None = None

    def run(self) -> None:
        """All that is left of the run."""
        # What a script's own backward, or a run that was broken off, left behind would go into the first update.
        self._executor.zero_grad()
        while not self._finished():
            self._run_epoch()
        self.check_finite()
        self._beacon.call(f"{AFTER}training")

    def _run_epoch(self) -> None:
        if not self._epoch_open:
            self._epoch_open = True
            self._hooks.control.new_epoch()
            self._hooks.epoch_begin()
        before = self._updates_in_epoch
        self._updates_per_epoch = self._feed.groups_per_epoch
        self._beacon.call("read data")
        with contextlib.closing(self._portions()) as portions:
            for portion in portions:
                self._update(portion)
                if self._leaves_epoch():
                    break
        if self._updates_in_epoch == before == 0:
            self._hooks.control.should_training_stop = True
            logger.warning("the data gave no update in epoch %d: training stops here", self._epoch)
        self._close_epoch()

    def _portions(self) -> Generator[UpdateBatch, None, None]:
        """The data that is left of the epoch."""
        if self._ends_at_once:
            return
        with contextlib.closing(self._feed.epoch(self._epoch)) as portions:
            while True:
                self._hooks.data_ahead()
                self.waits_for_data = True
                try:
                    portion = next(portions, None)
                finally:
                    self.waits_for_data = False
                if portion is None:
                    return
                yield portion

    # Nothing would be lost if this process were told to leave right now, wherever it waits.
    waits_for_data = False

    def _close_epoch(self) -> None:
        if self._hooks.control.should_epoch_stop:
            # A callback ended the epoch early: what is left of its data is not seen.
            self._position = {}
        self._epoch_open = False
        complete = not self._stopped_within_epoch
        if complete:
            self._data_spent = False
            self._epoch += 1
            self._updates_in_epoch = 0
        self._hooks.epoch_end(complete)
        self._hooks.due()

    def _update(self, portion: UpdateBatch) -> None:
        """One optimizer update: group -> gradients -> update -> ledger -> events."""
        state, hooks = self._state, self._hooks
        hooks.control.new_step()
        self._seed_step(state.global_step)
        self._beacon.step(state.global_step)
        hooks.set_learning_rate(state.global_step)
        hooks.step_begin()
        portion, result = self._made(portion)
        self._advance(portion)
        self._ledger.add(result.loss, result.norm, result.parts, result.applied)
        hooks.signals_agreed(portion.signals)
        if self._rolled_back(portion, result):
            return
        hooks.update_applied(portion, result.applied)
        hooks.step_end()
        hooks.due()

    def _made(self, portion: UpdateBatch) -> tuple[UpdateBatch, StepResult]:
        """The update; where memory does not hold its micro-batches, that of the same samples in smaller ones."""
        while True:
            try:
                return portion, self._executor.run_step(portion.group, self._request(portion), self._hooks)
            except Exception as error:
                if not self._hooks.too_large(error):
                    raise
            # Outside the handler, whose traceback holds on to all that did not fit.
            portion = self._feed.again(self._hooks.shrink())
            self._seed_step(self._state.global_step)

    def _request(self, portion: UpdateBatch) -> StepRequest:
        options = self._options
        return StepRequest(
            portion.denominator
            or 1.0,  # without targets there is nothing to divide, and zero by zero would be NaN
            portion.targets,
            portion.samples,
            portion.total_samples,
            options.max_grad_norm,
            options.guard,
            empty=portion.denominator == 0,
        )

    def _advance(self, portion: UpdateBatch) -> None:
        self._state.global_step += 1
        self._updates_in_epoch += 1
        self._position = portion.group.position
        self._data_spent = portion.last
        self._state.epoch = self._fractional_epoch(portion.last)

    def _fractional_epoch(self, last: bool) -> float:
        if last:
            return float(self._epoch + 1)
        # A stream of unknown length: the run as a whole counts as one pass.
        return self._epoch + self._updates_in_epoch / (self._updates_per_epoch or self._state.max_steps)

    # --- when to stop -----------------------------------------------------------------------------------------------

    @property
    def _ends_at_once(self) -> bool:
        """Resumed after the last update of an epoch or the run, or after a stop: closing events are left."""
        return self._data_spent or self._leaves_epoch()

    def _leaves_epoch(self) -> bool:
        control = self._hooks.control
        return (
            control.should_training_stop
            or control.should_epoch_stop
            or self._state.global_step >= self._state.max_steps
        )

    @property
    def _stopped_within_epoch(self) -> bool:
        """The run ends here, the epoch does not: a checkpoint saved now must lead back to the rest of its data."""
        ended = self._data_spent or self._hooks.control.should_epoch_stop
        return self._leaves_epoch() and not ended

    def _finished(self) -> bool:
        if self._epoch_open:
            return False
        stop = self._hooks.control.should_training_stop or self._state.global_step >= self._state.max_steps
        return stop or self._epoch >= self._options.epochs + self._extra_epochs

    # --- non-finite values ------------------------------------------------------------------------------------------

    def _rolled_back(self, portion: UpdateBatch, result: StepResult) -> bool:
        """Look whether the update was finite; gives whether it was not, and the run went back for it."""
        suspect = Suspect(self._state.global_step, portion.group, result.losses, result.applied)
        if portion.denominator == 0 and not result.applied:
            warn_once(
                logger, "updates whose data holds no target on any rank are skipped, and counted as skipped"
            )
            return False
        if self._options.guard:
            if result.applied or not self._hooks.update_refused(suspect, result):
                return False
            # The data goes on behind what was refused, so the updates that were undone need other data at the end.
            self._extra_epochs += 1
            return True
        found = self._watch.add(result.loss, result.norm if result.applied else result.loss, suspect)
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
        # The norm is the same on all ranks, so all come here. Of a loss of one rank alone the others know nothing.
        if suspect.applied and not math.isfinite(norm):
            what = self._hooks.explain_nonfinite(suspect)
        else:
            what = nonfinite_at(suspect.step, suspect.group.ids)
        raise NonFiniteError(
            f"{what}: loss {loss}, gradient norm {norm}. Nothing was saved after it. Resume from the last checkpoint "
            "with a lower learning rate, mend those samples, or set nonfinite_policy to 'skip' or 'rollback'"
        )

    @property
    def position(self) -> State:
        """Where this rank's data goes on; ranks with loaders of their own stand at different places."""
        return self._position

    def go_on_from(self, position: State) -> None:
        """Set where this rank's data goes on, before `load_state_dict`, whose position is the main process's."""
        self._own_position = position

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {
            "epoch": self._epoch,
            "updates_in_epoch": self._updates_in_epoch,
            "updates_per_epoch": self._updates_per_epoch,
            "epoch_open": self._epoch_open,
            "data_spent": self._data_spent,
            "epoch_stopped": self._epoch_open and self._hooks.control.should_epoch_stop,
            "position": self._position,
            "extra_epochs": self._extra_epochs,
        }

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._updates_in_epoch = state["epoch"], state["updates_in_epoch"]
        self._epoch_open, self._data_spent = state["epoch_open"], state["data_spent"]
        own, self._own_position = self._own_position, None
        self._position, self._extra_epochs = state["position"] if own is None else own, state["extra_epochs"]
        self._hooks.control.should_epoch_stop = state["epoch_stopped"]
        self._feed.restore(self._position)
        if (
            self._feed.groups_per_epoch != state["updates_per_epoch"]
            and self._position
            and not self._data_spent
        ):
            # Updates have another size now: what lies behind counts in theirs.
            self._updates_in_epoch = self._feed.groups_behind(self._position) or self._updates_in_epoch


def nonfinite_at(step: int, ids: list[list[int]]) -> str:
    """What happened, in words. `ids` are the samples of the update, by micro-batch; empty where unknown."""
    named = [index for batch in ids for index in batch]
    shown = ", ".join(map(str, named[:16])) + (f" and {len(named) - 16} more" if len(named) > 16 else "")
    return f"loss or gradient became non-finite at step {step}" + (f" (samples {shown})" if named else "")
