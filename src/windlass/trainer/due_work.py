"""Work between two updates: log, evaluate, save, and exit if a scheduler requests it; and the signals that ranks send
with their data, so that all do the same work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.background import Counters
from windlass.core.errors import Preempted
from windlass.core.logs import get_job_logger
from windlass.core.run_clock import EVALUATION, SAVE, Moment, run_clock
from windlass.dist.beacon import beacon
from windlass.dist.gang import Gang
from windlass.engine.evaluate import closing_if_possible
from windlass.engine.uneven_batches import EvaluationAbandoned, interruptible_batches
from windlass.trainer.best_tracker import find_metric
from windlass.trainer.hooks import TrainHooks, every_forward_meets
from windlass.trainer.interruption import Interruption, WaitBrokenOff
from windlass.trainer.run import Run
from windlass.trainer.run_checkpoints import RunCheckpoints

logger = get_job_logger(__name__)


class Signals(NamedTuple):
    """Numbers that every rank sends with each group of data; their sums reach all ranks at the same update."""

    stop: float = 0.0  # requests to end the run with this update
    leave: float = 0.0  # processes that got a scheduler's signal
    # The main process's clock requests an ephemeral checkpoint, or one to replace a failed one
    save_due: float = 0.0
    # `written`, `settled`, `failed`: the counters of the save under way (`checkpoint.background.Counters`)
    written: float = 0.0
    settled: float = 0.0
    failed: float = 0.0


_NONE = Signals()


class SignalExchange:
    """Collects this rank's signals, and applies the sums over all ranks.

    Attributes:
        clock_asks: by the last exchange, the clock requests a checkpoint.
        save_due: the same, and there is something new to save.
    """

    def __init__(self, all_ranks: Gang, interruption: Interruption, checkpoints: RunCheckpoints) -> None:
        self._all_ranks, self._interruption, self._checkpoints = all_ranks, interruption, checkpoints
        self._saver = checkpoints.saver
        self.clock_asks = self.save_due = False
        self._saved_step = 0

    def own(self) -> Signals:
        """This rank's signals."""
        checkpoints, interruption = self._checkpoints, self._interruption
        due = self._all_ranks.rank == 0 and time.monotonic() >= checkpoints.due_at
        asks = due or interruption.stop_requested or interruption.preemption_requested
        if not asks and not self._saver.busy:
            return _NONE  # the usual case, in every update
        return Signals(
            interruption.stop_requested, interruption.preemption_requested, due, *self._saver.counters()
        )

    def apply(self, sums: Sequence[float], step: int) -> Signals:
        """Apply the signals of all ranks, given as sums, at the present step."""
        received = Signals(*sums) if any(sums) else _NONE
        self._interruption.preempted |= received.leave > 0
        if received is not _NONE and self._saver.busy:
            with run_clock().within(SAVE):
                self._saver.received(Counters(received.written, received.settled, received.failed))
        self.clock_asks = received.save_due > 0
        # A signal that was sent before a save began still requests it. And the clock does not replace the checkpoint
        # that the run was resumed from.
        self.save_due = self.clock_asks and step - self._saved_step > 1 and not self._saver.busy
        return received

    def saved(self, step: int) -> None:
        """Called before a save of this step, or if the run was resumed from one."""
        self.save_due, self._saved_step = False, step


class DueWork:
    """Does what control flags, the clock and signals request. All ranks make the same calls.

    Args:
        run: the run whose work it is.
        hooks: what logs, evaluates and saves.
        signals: of all ranks.
    """

    def __init__(self, run: Run, hooks: TrainHooks, signals: SignalExchange) -> None:
        context = run.context
        self._context, self._events, self._interruption = context, context.events, context.interruption
        self._hooks, self._plan, self._signals = hooks, context.plan, signals
        self._checkpoints, self._reports, self._loop = run.checkpoints, run.reports, run.loop
        self._pending = run.pending
        self._beacon, self._clock = beacon(), run_clock()
        self._started = Moment()
        self._read_once = self._seen = self._events.read_once()  # as the run began, and last
        self._saved_step = 0

    def begin(self, started: Moment) -> None:
        """Begin training at this moment; first do the work that an earlier part of the run could not finish."""
        self._started = started
        pending = self._pending
        evaluation, save = pending.left, pending.save_left
        pending.left = pending.save_left = False
        if not evaluation:
            return
        control, has_data = self._events.control, self._hooks.has_evaluation_data
        if not has_data:
            logger.warning(
                "the evaluation that was abandoned at step %d is skipped: there is no evaluation data now",
                self._events.state.global_step,
            )
        control.should_evaluate, control.should_save = has_data, save
        self.run()

    def run(self) -> None:
        """Log, evaluate and save, in this order, each if a callback of any rank, the clock or a signal requests it."""
        events, interruption = self._events, self._interruption
        if events.flags_may_differ:
            events.merge_flags()
        if events.control.should_log:
            self._do("log", self._log)
        if events.control.should_evaluate:
            self._do("evaluate", self._evaluate)
        # Read after the evaluation, which may have received a scheduler's signal.
        preempted = interruption.preempted
        asked = events.control.should_save or interruption.stopped or self._signals.save_due
        if preempted or (asked and not self._is_left_to_epoch_end()):
            self._do("save", self._save)
        if preempted:
            self.leave()

    def run_by_script(self) -> None:
        """`run`, called by the script's `_maybe_log_save_evaluate`, before and after which it may set flags, too."""
        self._events.merge_flags()
        self._hooks.work_between_updates(self.run, *self._reports.interval(), self._started)
        self._clock.row = {}  # of a report that the script made itself
        self._events.merge_flags()

    def run_by_copy(self) -> None:
        """Have the script's `_maybe_log_save_evaluate`, which calls no inherited one, log, evaluate and save; then do
        what signals and the clock request, of which it does not know.
        """
        events, checkpoints, hooks = self._events, self._checkpoints, self._hooks
        events.merge_flags()
        if events.control.should_evaluate:
            self._settle()
        with (
            events.on_save_by_commits(lambda: checkpoints.tried_at),
            hooks.called_by_copy(self._observe, self._saving_by_copy),
        ):
            hooks.work_between_updates(None, *self._reports.interval(), self._started)
        self._clock.row = {}
        events.merge_flags()
        control = events.control
        # What it left undone is not done at another step.
        control.should_log = control.should_evaluate = control.should_save = False
        if not self.is_saved:
            control.should_save = self._keeps_evaluated()
            self.run()
        elif self._interruption.preempted:
            self.leave()

    def _do(self, name: str, work: Callable[[], None]) -> None:
        self._beacon.call(name)
        work()
        self._events.merge_flags()

    def _log(self) -> None:
        self._warn_of_changes()
        logs = self._reports.progress()
        if logs:
            logs.update(self._hooks.reported_figures())
            self._hooks.log(logs, self._started)
            self._clock.row = {}

    def _warn_of_changes(self) -> None:
        present = self._events.read_once()
        for name, value in self._read_once.items():
            if present[name] not in (value, self._seen[name]):
                logger.warning(
                    "args.%s was changed from %s to %s while the run trains, which goes on with %s: stop it (control."
                    "should_training_stop) and call train(resume_from_checkpoint=True) for another value",
                    *(name, value, present[name], value),
                )
        self._seen = present

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        events = self._events
        metrics = self.evaluate_or_stop()
        if metrics is None:
            self._pending.left, self._pending.save_left = True, events.control.should_save
            events.control.should_evaluate = False  # as after every evaluation
            return
        save = self._plan.save
        self._observe(metrics)
        self._settle()
        new_best = self._hooks.judge(metrics)
        kept = self._checkpoints.best.keeps_last()
        if save.cadence.strategy == "best":
            events.control.should_save = new_best or kept
        elif kept or (new_best and save.load_best_at_end):
            # Saved at any step: the best weights must exist when they are loaded.
            events.control.should_save = True

    def _observe(self, metrics: dict[str, float]) -> None:
        schedule = self._context.built.schedule
        if schedule.follows_metric:
            schedule.observe(find_metric(metrics, self._plan.save.metric or "loss"))

    def _settle(self) -> None:
        """Wait for the save under way before an evaluation is ranked: the best is one of the committed checkpoints."""
        if self._plan.save.load_best_at_end or self._plan.save.keep_best:
            self._checkpoints.finish()

    def _keeps_evaluated(self) -> bool:
        """Return True if the present step was evaluated, and its weights are among the best that are kept."""
        best, state = self._checkpoints.best, self._events.state
        if best.metric_at(state.global_step) is None:
            return False
        is_best = self._plan.save.load_best_at_end and state.best_global_step == state.global_step
        return best.keeps_last() or is_best

    def evaluate_or_stop(self, starting: bool = False) -> dict[str, float] | None:
        """Return the metrics of an evaluation; None if it was abandoned, because the run is to end. `starting`: before
        the first update. Collective.
        """
        events = self._events
        # Before it: a callback may count evaluations, and the one that is abandoned must not count.
        logged, put_back = len(events.state.log_history), events.remember_callbacks()
        try:
            with (
                self._clock.within(EVALUATION),
                self._context.services.evaluator.interruptible(self._interruptible),
            ):
                return self._hooks.evaluate(starting)
        except (EvaluationAbandoned, WaitBrokenOff):
            pass
        # The resumed run starts it again, and reports everything again.
        del events.state.log_history[logged:]
        put_back()
        return None

    def _interruptible(self, batches: Iterable[Any], meets: bool) -> Generator[Any, None, None]:
        """The batches of an evaluation, which all ranks abandon together if the run is to end. `meets`: ranks also meet
        at each batch.
        """

        def received(sums: Sequence[float]) -> None:
            self._signals.apply(sums, self._events.state.global_step)
            if self._interruption.preempted or self._interruption.stopped:
                raise EvaluationAbandoned

        strategy = self._context.built.executor.strategy
        return interruptible_batches(
            self._waited_for(batches),
            self._context.all_ranks,
            self._signals.own,
            received,
            in_step=self._context.forwards_meet or meets or every_forward_meets(strategy),
        )

    def _waited_for(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        remaining, end = iter(batches), object()
        with closing_if_possible(remaining):
            while True:
                self._pending.waits_for_data = True
                try:
                    self._interruption.check_wait()
                    batch = next(remaining, end)
                finally:
                    self._pending.waits_for_data = False
                if batch is end:
                    return
                yield batch

    # --- saving -----------------------------------------------------------------------------------------------------

    def _is_left_to_epoch_end(self) -> bool:
        """Return True if the end of the epoch follows and saves: of two saves at one step the second would replace the
        first.
        """
        if not self._loop.epoch_ends:
            return False
        if self._interruption.stopped:
            # An epoch that is complete ends with its events; its evaluation is left to the run that resumes.
            return not self._loop.stops_within_epoch
        return self._plan.save.cadence.strategy == "epoch"

    @property
    def is_saved(self) -> bool:
        """True if the run saved, or tried to, at its present step."""
        return self._saved_step == self._events.state.global_step

    def _save(self) -> None:
        with self._clock.within(SAVE):
            self._save_now()

    @contextlib.contextmanager
    def _saving_by_copy(self) -> Iterator[None]:
        """Context of the checkpoint that a copy of `_maybe_log_save_evaluate` saves."""
        with self._clock.within(SAVE):
            self._keeps_evaluated()  # ranks it: the ranking is in the checkpoint
            self._begin_attempt(planned=True)
            yield
            self._checkpoints.ephemeral = False
            self._interruption.saved()

    def _begin_attempt(self, planned: bool) -> None:
        step = self._events.state.global_step
        self._checkpoints.begin_attempt(planned, due=self._signals.clock_asks)
        self._signals.saved(step)
        self._saved_step = step
        # The update before may have been non-finite without having been read yet: such weights are not saved.
        self._loop.check_finite()

    def _save_now(self) -> None:
        interruption, checkpoints = self._interruption, self._checkpoints
        step = self._events.state.global_step
        self._begin_attempt(
            self._events.control.should_save or interruption.stopped or interruption.preempted
        )
        self._hooks.save_checkpoint()
        if checkpoints.tried_at != step:  # the script's `_save_checkpoint` saves otherwise, and has done so
            self._events.fire("on_save")
        checkpoints.ephemeral = False  # saves that a script starts itself are not ephemeral
        interruption.saved()
        self._events.control.should_save = False

    def save_stopped(self) -> None:
        """Save after a Ctrl-C that came while the run waited for data."""
        if self.is_saved:
            self._interruption.saved()
        else:
            self._save()

    def save_and_leave(self) -> None:
        """Save and exit after a preemption that came while the run waited for data, or after its last update."""
        self._interruption.preempted = True
        if not self.is_saved:
            self._save()
        self.leave()

    def leave(self) -> None:
        """Raise Preempted once the run is saved. Collective."""
        self._checkpoints.finish_last(self._hooks.save_checkpoint, leaving=True)
        folder, step = self._checkpoints.newest, self._events.state.global_step
        logger.warning("exiting at step %d; the run can be resumed from %s", step, folder or "its beginning")
        raise Preempted(step, folder)
