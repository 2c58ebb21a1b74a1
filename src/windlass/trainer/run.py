"""One call of `train()`: its parts, its beginning and end, and the work that follows each update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import DistError

from windlass.assemble.build import Built
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.stored import load_folder
from windlass.config.plan import RunPlan, UpdateSize
from windlass.core.clock import Moment
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.rng import StepSeeder
from windlass.core.types import State, Stateful, TrainOutput
from windlass.core.world import World
from windlass.data.group import Group, GroupSource
from windlass.dist.beacon import beacon
from windlass.engine.executor import StepResult
from windlass.engine.feed import Counts, Feed, UpdateBatch
from windlass.engine.loop import Loop, LoopOptions, Suspect
from windlass.metrics.ledger import FiniteWatch, Ledger
from windlass.precision.dtypes import weights_of
from windlass.trainer import save_retry
from windlass.trainer.agreement import Agreement
from windlass.trainer.batch_fitter import UpdateFitter
from windlass.trainer.best_tracker import BestTracker, find_metric
from windlass.trainer.blame import find_nonfinite_samples, overflow_alone
from windlass.trainer.checkpointer import Checkpointer
from windlass.trainer.continuing import ForeignPlace, restore_foreign
from windlass.trainer.defaults import multiplied_parameters, retention_of
from windlass.trainer.due_work import DueWork
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.interruption import Interruption, WaitBrokenOff
from windlass.trainer.micro_steps import MicroSteps
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.publishing import end_waits
from windlass.trainer.resuming import CheckpointSource, merged_ledger, saved_loss
from windlass.trainer.run_folder import RunFolder
from windlass.trainer.run_reports import RunReports, count_inputs
from windlass.trainer.run_saver import RunSaver
from windlass.trainer.saved_parts import (
    Buffers,
    Generators,
    Position,
    RankPart,
    SavedPart,
    SavedParts,
    check_savable,
)
from windlass.trainer.services import Services
from windlass.trainer.session import together
from windlass.transforms.neftune import noisy_embeddings
from windlass.transforms.overflow_watch import watching

logger = get_logger(__name__)
job_logger = get_job_logger(__name__)


class Run:
    """Implements `engine.loop.LoopHooks`.

    Attributes:
        executor, schedule, loop, ledger: the run's parts, whose states make up a checkpoint.
        checkpointer, best, saver: its checkpoints.
        first_tokens: `num_input_tokens_seen` when this call began.

    Args:
        manager: of the checkpoints in `folder`.
        registered: objects of the script's own that are saved with the run, one state per rank. A method `adopt` of
            them gets the states of all ranks if their number has changed.
        pad_token: the id that input counts leave out; None if there is none.
    """

    def __init__(
        self, services: Services, interruption: Interruption, hooks: TrainHooks, plan: RunPlan, source: GroupSource,
        built: Built, folder: RunFolder, manager: CheckpointManager, files: ModelWriter,
        registered: Sequence[Stateful], pad_token: int | None,
    ) -> None:  # fmt: skip
        self._session, self._events, self._evaluator = services.session, services.events, services.evaluator
        self._accelerator, self._engine = services.accelerator, services.engine
        self._gang, self._loss = services.session.gang, services.loss
        self._interruption, self._hooks, self._plan = interruption, hooks, plan
        self._folder, self._files, self._registered = folder, files, registered
        self.executor, self.schedule = built.executor, built.schedule
        device = self._session.device
        self._source_samples = getattr(source, "num_samples", None)
        self._fitter = UpdateFitter(
            services.fitter, self._session, files.model, source, built.executor, plan.batch
        )
        # Called in every update, so without another method in between.
        self.event = self._events.fire_if_heard
        self.set_learning_rate = built.schedule.set
        self.steps = MicroSteps(
            services.loss, built.executor, self._accelerator, device, self.event, built.schedule.advance,
            hooks.training_step, hooks.noting_loss,
        )  # fmt: skip
        self.ledger = Ledger(device, self._gang.sum)
        self._seed_step = StepSeeder(plan.seed, self._gang.rank, device)
        self._seed_step.start(0)
        self._beacon = beacon()
        self._events.use_plan(plan)
        self._use_size(plan.batch)
        manager.retention = retention_of(plan.save)
        self.saver = RunSaver(manager, plan.save, self._gang, device, hooks.may_save_in_background)
        self._agreement = Agreement(self._gang, interruption, self.saver)
        self.loop = self._new_loop(source, pad_token)
        self.best = BestTracker(plan.save, self._events, manager.store.path_for)
        self._source = CheckpointSource(self._session, folder, manager)
        self.checkpointer = Checkpointer(
            self._session, self._events, plan.save, folder, self._source, files,
            built.executor.optimizer, self.best, self._list_parts, self.saver, self._described,
            hooks.write_model,
        )  # fmt: skip
        self._reports = RunReports(
            plan, self._events.state, self.ledger, services.session.memory,
            multiplied_parameters(files.model), built.schedule.last_lrs,
        )  # fmt: skip
        self._due = DueWork(
            self._gang, self._events, hooks, plan, services.evaluator, interruption, self._agreement,
            self.checkpointer, self.saver, self.best, self._reports, built.schedule, self.loop,
            lambda: built.executor.strategy.sharded or self._accelerator.forwards_meet,
        )  # fmt: skip
        self.due = self._due.run
        self._continued: Checkpoint | None = None
        self.first_tokens = 0

    def _new_loop(self, source: GroupSource, pad_token: int | None) -> Loop:
        plan, strategy = self._plan, self.executor.strategy
        accumulation = self._fitter.size.accumulation
        in_step = strategy.sharded or plan.dist.reduce_each
        feed = Feed(source, accumulation, self._counts(pad_token), self._gang, in_step)
        options = LoopOptions(
            epochs=plan.duration.epochs,
            max_grad_norm=plan.stability.max_grad_norm,
            guard=plan.stability.nonfinite != "raise",
            restart_epoch=plan.data.restart_epoch,
        )
        watch = FiniteWatch(self._session.device)
        return Loop(
            self.executor, feed, self, self._events.state, self.ledger, watch, self._seed_step, options
        )

    def _use_size(self, size: UpdateSize) -> None:
        processes = size.world if self._accelerator.split_batches else 1
        self._events.state.train_batch_size = size.micro * processes
        self._accelerator.gradient_accumulation_steps = size.accumulation

    def _counts(self, pad_token: int | None) -> Counts:
        tokens, positions = count_inputs(self._files.model, self._plan.reports.tokens, pad_token)
        count = self._loss.hooks.count_targets
        return Counts(count, tokens, positions, self._inspect_first, self._agreement.own)

    def _list_parts(self) -> SavedParts:
        """The parts of a checkpoint, in the order in which they are restored: random generators last."""
        buffers = Buffers(self.executor.strategy)
        return SavedParts(self._gang.rank, self._gang.size, [
            SavedPart("best", self.best, optional=True),
            SavedPart("schedule", self.schedule),
            SavedPart("executor", self.executor),
            RankPart("position", Position(self.loop), rolls_back=False),
            SavedPart("loop", self.loop, rolls_back=False),
            SavedPart("due_work", self._due, rolls_back=False, optional=True, earlier="unfinished"),
            RankPart("ledger", self.ledger, adopt=self._merge_ledgers),
            RankPart("buffers", buffers, adopt=buffers.adopt),
            *(
                RankPart(f"registered-{number}", owner, optional=True, adopt=functools.partial(self._take_over, owner))
                for number, owner in enumerate(self._registered)
            ),
            RankPart("rng", Generators(self._session.device), adopt=self._reseed),
        ])  # fmt: skip

    def _merge_ledgers(self, states: list[State]) -> None:
        self.ledger.load_state_dict(merged_ledger(states, mine=self._gang.rank == 0))

    def _take_over(self, owner: Stateful, states: list[State]) -> None:
        adopt: Callable[[list[State]], None] | None = getattr(owner, "adopt", None)
        if adopt is not None:
            adopt(states)
            return
        logger.warning(
            "%d process(es) saved a state of a registered object, this run has %d: each takes that of its rank, "
            "further ones that of rank 0", len(states), self._gang.size
        )  # fmt: skip
        owner.load_state_dict(states[self._gang.rank if self._gang.rank < len(states) else 0])

    def _reseed(self, states: list[State]) -> None:
        self._seed_step.start(self._events.state.global_step)

    def _described(self) -> dict[str, Any]:
        return {"update_size": self._fitter.size.to_dict(), "loss": self._loss.facts()}

    # --- from beginning to end --------------------------------------------------------------------------------------

    def execute(self, checkpoint: Checkpoint | None, place: ForeignPlace | None) -> TrainOutput:
        """Train, from a checkpoint's state or from the beginning. `place` is the position in this run's data if
        `checkpoint` is of a run of transformers' Trainer.
        """
        state = self._events.state
        with self._evaluator.during(self.executor):
            self._continued = checkpoint
            if checkpoint is not None:
                self._hooks.load_weights(str(checkpoint.folder))
                self._restore(checkpoint, place)
            self.first_tokens = state.num_input_tokens_seen
            self._hooks.load_training_state(None if checkpoint is None else str(checkpoint.folder))
            self._agreement.saved(state.global_step)
            self._reports.announce(self._source_samples, weights_of(self._files.model))
            self._check_metric()
            self._check_savable()
            with (
                self._interruption.taking_ctrl_c(self),
                telling_where(self._session.world, lambda: state.global_step),
                self._reports.counting_compilations(),
                noisy_embeddings(self._files.model, self._plan.transforms.neftune_alpha),
                watching(self._files.model, self._plan.stability.watch_forwards),
            ):
                started = Moment()
                self._train(started)
            output = self._finish(started)
            self._end()
        return output

    def _restore(self, checkpoint: Checkpoint, place: ForeignPlace | None) -> None:
        restore_args = self._plan.reports.restore_callback_args
        if not isinstance(checkpoint, ForeignCheckpoint):
            self._loss.begin_run(saved_loss(checkpoint))
            self.checkpointer.restore(checkpoint, restore_args)
            return
        assert place is not None, "the place was found before the plan was made"
        self._events.adopt(TrainerState.from_dict(checkpoint.state))
        self.checkpointer.find_best(checkpoint)
        restore_foreign(
            checkpoint,
            place,
            self._files.model,
            self.executor.optimizer,
            self.schedule,
            self.executor,
            self.loop,
        )
        self._seed_step.start(checkpoint.step)
        self._events.restore_callbacks(restore_args)

    def _check_savable(self) -> None:
        """Check before the first update that the state of the script's own objects can be saved. Collective."""
        save = self._plan.save
        if save.model_only or (save.cadence.strategy == "no" and save.every is None):
            return

        def check() -> None:
            check_savable("lr_scheduler", self.schedule.exposed, self.schedule)
            for owner in self._registered:
                check_savable("accelerator.register_for_checkpointing", owner, owner)

        together(self._gang, check)

    def _check_metric(self) -> None:
        """Check before the first update that evaluation returns the metric that the run needs."""
        metric = self._plan.save.metric or ("loss" if self.schedule.follows_metric else None)
        if metric is None or self._plan.evaluation.strategy == "no" or self._hooks.rehearse is None:
            return
        find_metric(self._hooks.rehearse(metric, self.executor.strategy), metric)

    def _train(self, started: Moment) -> None:
        events, interruption, save = self._events, self._interruption, self._hooks.save_checkpoint
        events.fire("on_train_begin")
        self.executor.average_by(events.averages())
        if self._plan.reports.evaluate_first and events.state.global_step == 0:
            # A schedule that follows the metric ignores it: no update was made yet.
            self._due.evaluate_or_stop()
        if interruption.stopped:
            events.control.should_training_stop = True  # which the first event of a run clears
        self._reports.load_watch.look(training=False)
        events.find_deciding_callbacks()
        if interruption.is_preempted():
            self._due.leave()  # nothing is to be saved
        self._due.begin(started)
        self.executor.model.train()
        self.executor.begin()
        try:
            self.loop.run()
        except WaitBrokenOff:
            if interruption.stopped:
                self._due.save_stopped()
            else:
                self._due.save_and_leave()
        if interruption.stopped:
            save()  # stopped before the first update: the loop did not save
        if interruption.is_preempted():
            self._due.save_and_leave()
        self.checkpointer.finish_last(save_retry.LAST_PAUSES, save)

    def _finish(self, started: Moment) -> TrainOutput:
        """Report, load the best model, and fire `on_train_end`."""
        metrics = self._reports.summary(started)
        self.executor.finish()
        self.executor.strategy.share_buffers()  # one model is left
        self.saver.release()
        state = self._events.state
        self._hooks.log(metrics, None)
        if self._plan.save.load_best_at_end:
            self._hooks.load_best_model()
        self._events.fire("on_train_end")
        self.checkpointer.finish()  # a callback may have saved there
        self._folder.upload()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _end(self) -> None:
        """Exit if a process was preempted since the last update; check that the last save did not fail. Collective.
        Raises Preempted if one was and the run is saved as it ended, and CheckpointError if it is not saved.
        """
        if self._interruption.is_preempted():
            if self._due.is_saved:
                self._due.leave()
            job_logger.warning(
                "preempted after the last update, which was not to be saved: a job that is started again would repeat "
                "it, so the script continues to its end"
            )
        self.checkpointer.check_last()

    def data_ahead(self) -> None:
        """Called before the data of the next update is requested."""
        self._fitter.remember()
        self._interruption.check_wait()

    @property
    def waits_for_data(self) -> bool:
        return self.loop.waits_for_data or self._due.waits_for_data

    @property
    def newest_checkpoint(self) -> Path | None:
        return self.checkpointer.newest

    def end_waits(self) -> None:
        end_waits(self._events.handler)

    def save_checkpoint(self, wait: bool) -> None:
        """Save the run; the default of `_save_checkpoint`. After training, wait until the checkpoint is committed, and
        unlock the folder. Collective.
        """
        try:
            with self.executor.averaged():
                self.checkpointer.save()
            if wait:
                self.checkpointer.finish()  # no later update does, and the process may end
        finally:
            if wait:
                self._folder.release(None)

    def load_weights(self, folder: Path, model: nn.Module) -> None:
        """Load the weights of the checkpoint that is continued, or of another folder."""
        if self._continued is not None and folder == self._continued.folder:
            self._continued.load_weights(model)
        else:
            load_folder(folder, model)

    def release(self) -> None:
        """Release the executor after the run. If it did not come to its end, its process does not wait for uploads."""
        self.end_waits()
        self.executor.release()

    # --- leaving early ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run with this update, and save."""
        self._events.control.should_training_stop = True
        self._interruption.stop()

    def _inspect_first(self, group: Group) -> int | None:
        """Measure the loss on the first group; if memory does not hold it, ask for smaller micro-batches."""
        try:
            self.steps.begin(group.batches[0], self._fitter.size.accumulation)
        except Exception as error:
            if not self.too_large(error):
                raise
        else:
            return None
        return (
            self.shrink()
        )  # outside the handler, whose traceback keeps the memory of the failed attempt alive

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def control(self) -> TrainerControl:
        return self._events.control

    def too_large(self, error: Exception) -> bool:
        return self._fitter.too_large(error)

    def shrink(self) -> int:
        report = self._fitter.shrink()
        self._use_size(self._fitter.size)
        self._hooks.log(dict(report), None)
        self.steps.check_division(self._fitter.size.accumulation)
        return self._fitter.size.accumulation

    def step_end(self) -> None:
        self.event("on_step_end")
        self._events.agree_on_flags()

    def epoch_end(self, complete: bool) -> None:
        if complete or not self._interruption.epoch_goes_on:
            self.event("on_epoch_end")
        self._events.agree_on_flags()

    # --- after an update ----------------------------------------------------------------------------------------------

    def update_applied(self, batch: UpdateBatch, applied: bool) -> None:
        """Counts that follow an update: samples, tokens, FLOPs."""
        self._reports.update_applied(batch)
        self._engine.step_was_skipped = not applied
        every = self._plan.reports.empty_cache_every
        if every and self._events.state.global_step % every == 0:
            self._accelerator.free_memory()

    def explain_nonfinite(self, suspect: Suspect) -> str:
        return find_nonfinite_samples(suspect, self._gang)

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        if overflow_alone(result, self._gang):
            return False
        what = self.explain_nonfinite(suspect)
        if self._plan.stability.nonfinite == "rollback":
            self._hooks.log(self.checkpointer.roll_back(what, self.loop.position), None)
            self.executor.begin()
            return True
        job_logger.warning("%s; this update is skipped", what)
        self._hooks.log({"skipped_update": self._events.state.global_step, "reason": what}, None)
        return False

    # --- signals of other ranks ---------------------------------------------------------------------------------------

    def signals_agreed(self, signals: Sequence[float]) -> None:
        told = self._agreement.apply(signals, self._events.state.global_step)
        if told.stop:
            self.stop()


# Words of the backends of process groups for a lost connection.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process has terminated")


@contextlib.contextmanager
def telling_where(world: World, updates: Callable[[], int]) -> Iterator[None]:
    """Add the rank and its number of updates to errors of the body, in a job of several processes."""
    try:
        yield
    except Exception as error:
        if world.is_distributed:
            error.add_note(f"This was rank {world.rank} of {world.size}, at step {updates()}.")
            if isinstance(error, DistError) or any(words in str(error) for words in _LOST):
                error.add_note("Another rank ended first, or never came: look for its own error.")
        raise
