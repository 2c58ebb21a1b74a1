"""One call of `train()`: its parts, its beginning and end, and the work that follows each update."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch.distributed import DistError

from windlass.accelerator.saved_parts import Generators, RankPart, SavedPart, check_savable
from windlass.callbacks.run_record import RunRecord, status_of
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint
from windlass.config.plan import UpdateSize
from windlass.core.events import TrainerState
from windlass.core.logs import SCRIPT_HINTS, get_job_logger, get_logger
from windlass.core.mesh import Mesh
from windlass.core.rng import StepSeeder
from windlass.core.run_clock import SAVE, UPLOAD, Moment, run_clock
from windlass.core.script_command import resume_hint
from windlass.core.types import State, Stateful, TrainOutput
from windlass.core.world import World
from windlass.data.update_batch import GroupSource, UpdateBatch
from windlass.engine.executor import StepResult
from windlass.engine.feed import Counts, Feed
from windlass.engine.loop import Loop, LoopHooks, LoopOptions, Suspect
from windlass.metrics.ledger import Ledger
from windlass.metrics.tokens import InputCounter
from windlass.trainer.batch_faults import Fed
from windlass.trainer.batch_fitter import UpdateFitter
from windlass.trainer.best_tracker import find_metric
from windlass.trainer.blame import find_nonfinite_samples, overflow_alone
from windlass.trainer.continuing import ForeignPlace, restore_foreign
from windlass.trainer.defaults import retention_of
from windlass.trainer.due_work import DueWork, SignalExchange
from windlass.trainer.interruption import Interruptible, WaitBrokenOff
from windlass.trainer.micro_steps import MicroSteps
from windlass.trainer.publishing import end_waits
from windlass.trainer.resuming import CheckpointSource, merged_ledger, saved_loss
from windlass.trainer.run_checkpoints import RunCheckpoints
from windlass.trainer.run_context import RunContext
from windlass.trainer.run_reports import RunReports
from windlass.trainer.run_restorer import RunRestorer
from windlass.trainer.session import together
from windlass.transforms.neftune import noisy_embeddings
from windlass.transforms.overflow_watch import watching

logger = get_logger(__name__)
job_logger = get_job_logger(__name__)


class Run(LoopHooks, Interruptible):
    """What one call of `train()` does at the events of its loop, and at its beginning and end.

    Attributes:
        executor, schedule, loop, ledger: the run's parts, whose states make up a checkpoint.
        checkpoints, restorer: saving and restoring it.
        first_tokens: `num_input_tokens_seen` when this call began.

    Args:
        source: its data.
        opener: opens the checkpoints of the run's folder.
        record: of what the run is and how it ends.
        pad_token: the id that input counts leave out; None if there is none.
    """

    def __init__(
        self, context: RunContext, source: GroupSource, opener: CheckpointSource, record: RunRecord,
        pad_token: int | None,
    ) -> None:  # fmt: skip
        plan, services, session = context.plan, context.services, context.session
        self._context, self._opener = context, opener
        self.progress = self._events = context.events
        self.executor, self.schedule = context.built.executor, context.built.schedule
        self._source_samples = getattr(source, "num_samples", None)
        self._fitter = UpdateFitter(
            services.fitter, session, context.files.model, source, self.executor, plan.batch
        )
        self.steps: MicroSteps = MicroSteps(context)
        # Of the ranks with the same samples, the first has their losses.
        counts = session.all_ranks.over("model").rank == 0
        self.ledger = Ledger(session.device, session.all_ranks.sum, counts)
        self._seed_step = StepSeeder(plan.seed, session.data_ranks.rank, session.device)
        self._seed_step.start(0)
        self._events.use_plan(plan)
        self._use_size(plan.batch)
        opener.manager.retention = retention_of(plan.save)
        self.checkpoints = RunCheckpoints(context, opener)
        self.restorer = RunRestorer(context, opener, self.checkpoints)
        self._signals = SignalExchange(session.all_ranks, context.interruption, self.checkpoints)
        self.loop = self._new_loop(source, pad_token)
        self._reports = RunReports(context, self.ledger, record)
        self._due = DueWork(context, self._signals, self.checkpoints, self._reports, self.loop)
        self.checkpoints.parts = self._list_parts()
        self.first_tokens = 0

    def _new_loop(self, source: GroupSource, pad_token: int | None) -> Loop:
        plan = self._context.plan
        in_step = self.executor.strategy.sharded or plan.dist.reduce_each
        accumulation = self._fitter.size.accumulation
        feed = Feed(source, accumulation, self._counts(pad_token), self._context.all_ranks, in_step)
        options = LoopOptions(
            epochs=plan.duration.epochs,
            max_grad_norm=plan.stability.max_grad_norm,
            guard=plan.stability.nonfinite != "raise",
            restart_epoch=plan.data.restart_epoch,
        )
        return Loop(self.executor, feed, self, self.ledger, self._seed_step, options)

    def _use_size(self, size: UpdateSize) -> None:
        accelerator = self._context.services.accelerator
        processes = size.ranks if accelerator.split_batches else 1
        self._events.state.train_batch_size = size.micro * processes
        accelerator.gradient_accumulation_steps = size.accumulation

    def _counts(self, pad_token: int | None) -> Counts:
        context = self._context
        main_input = getattr(context.files.model, "main_input_name", "input_ids")
        inputs = InputCounter(main_input, context.plan.reports.tokens, pad_token)
        count = context.services.loss.hooks.count_targets
        check = self._check_batches if context.services.faults.checks_ahead else None
        return Counts(count, inputs, self._inspect_first, self._signals.own, check)

    def _check_batches(self, group: UpdateBatch) -> None:
        for batch, ids in zip(group.batches, group.ids, strict=True):
            self._context.services.faults.check(Fed("training", batch, ids))

    def _list_parts(self) -> list[SavedPart]:
        """The parts of a checkpoint, in the order in which they are restored: random generators last."""
        own = self.executor.strategy.own
        return [
            SavedPart("best", self.checkpoints.best, optional=True),
            SavedPart("schedule", self.schedule),
            SavedPart("executor", self.executor),
            RankPart("position", Position(self.loop), rolls_back=False),
            SavedPart("loop", self.loop, rolls_back=False),
            SavedPart("due_work", self._due, rolls_back=False, optional=True, earlier="unfinished"),
            RankPart("ledger", self.ledger, adopt=self._merge_ledgers),
            *self._reports.parts(),
            RankPart("buffers", own, adopt=own.adopt),
            *(
                RankPart(f"registered-{number}", owner, optional=True, adopt=functools.partial(self._take_over, owner))
                for number, owner in enumerate(self._context.services.accelerator.registered_objects)
            ),
            RankPart("rng", Generators(self._context.session.device), adopt=self._reseed),
        ]  # fmt: skip

    def _merge_ledgers(self, states: list[State]) -> None:
        self.ledger.load_state_dict(merged_ledger(states, mine=self._context.all_ranks.rank == 0))

    def _take_over(self, owner: Stateful, states: list[State]) -> None:
        adopt: Callable[[list[State]], None] | None = getattr(owner, "adopt", None)
        if adopt is not None:
            adopt(states)
            return
        logger.warning(
            "%d process(es) saved a state of a registered object, this run has %d: each takes that of its rank, "
            "further ones that of rank 0", len(states), self._context.all_ranks.size
        )  # fmt: skip
        owner.load_state_dict(
            states[self._context.all_ranks.rank if self._context.all_ranks.rank < len(states) else 0]
        )

    def _reseed(self, states: list[State]) -> None:
        self._seed_step.start(self._events.state.global_step)

    def _trained(self) -> dict[str, float]:
        """Seconds and samples of all calls of `train()` up to now, since the step `from_step`."""
        counts = self._reports.counts
        return {**counts, "seconds": counts["seconds"] + time.monotonic() - self._reports.began}

    # --- from beginning to end --------------------------------------------------------------------------------------

    def execute(self, checkpoint: Checkpoint | None, place: ForeignPlace | None) -> TrainOutput:
        """Train, from a checkpoint's state or from the beginning. `place` is the position in this run's data if
        `checkpoint` is of a run of transformers' Trainer.
        """
        context, state = self._context, self._events.state
        hooks, model = context.hooks, context.files.model
        with context.services.evaluator.during(self.executor):
            self.restorer.continued = checkpoint
            if checkpoint is not None:
                hooks.load_weights(str(checkpoint.folder))
                self._restore(checkpoint, place)
            self.first_tokens = state.num_input_tokens_seen
            hooks.load_training_state(None if checkpoint is None else str(checkpoint.folder))
            self._signals.saved(state.global_step)
            self._reports.announce(self._source_samples)
            self._check_metric()
            self._check_savable()
            with (
                context.interruption.taking_ctrl_c(self),
                telling_where(context.session.world, lambda: state.global_step, context.all_ranks.mesh),
                self._reports.counting(),
                noisy_embeddings(model, context.plan.transforms.neftune_alpha),
                watching(model, context.plan.stability.watch_forwards),
            ):
                started = Moment()
                saved = None if checkpoint is None else checkpoint.meta.get("trained")
                self._reports.begin(saved)
                self._train(started)
            output = self._finish(started)
            self._end()
        return output

    def _restore(self, checkpoint: Checkpoint, place: ForeignPlace | None) -> None:
        restore_args = self._context.plan.reports.restore_callback_args
        if not isinstance(checkpoint, ForeignCheckpoint):
            self._context.services.loss.begin_run(saved_loss(checkpoint))
            self.restorer.restore(checkpoint, restore_args)
            return
        assert place is not None, "the place was found before the plan was made"
        self._events.adopt(TrainerState.from_dict(checkpoint.state))
        self.restorer.find_best(checkpoint)
        restore_foreign(
            checkpoint,
            place,
            self._context.files.model,
            self.executor.optimizer,
            self.schedule,
            self.executor,
            self.loop,
        )
        self._seed_step.start(checkpoint.step)
        self._events.restore_callbacks(restore_args)

    def _check_savable(self) -> None:
        """Check before the first update that the state of the script's own objects can be saved. Collective."""
        save = self._context.plan.save
        if save.model_only or (save.cadence.strategy == "no" and save.every is None):
            return

        def check() -> None:
            check_savable("lr_scheduler", self.schedule.exposed, self.schedule)
            for owner in self._context.services.accelerator.registered_objects:
                check_savable("accelerator.register_for_checkpointing", owner, owner)

        together(self._context.all_ranks, check)

    def _check_metric(self) -> None:
        """Check before the first update that evaluation returns the metric that the run needs."""
        plan, hooks = self._context.plan, self._context.hooks
        metric = plan.save.metric or ("loss" if self.schedule.follows_metric else None)
        if metric is None or plan.evaluation.strategy == "no" or not hooks.rehearses:
            return
        find_metric(hooks.rehearse(metric, self.executor.strategy), metric)

    def _train(self, started: Moment) -> None:
        context, events = self._context, self._events
        interruption, save = context.interruption, context.hooks.save_checkpoint
        events.fire("on_train_begin")
        self.executor.average_by(events.averages())
        if context.plan.reports.evaluate_first and events.state.global_step == 0:
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
        self.checkpoints.finish_last(save)

    def _finish(self, started: Moment) -> TrainOutput:
        """Report, load the best model, and fire `on_train_end`."""
        run_clock().enter(SAVE)
        metrics = self._reports.summary(started)
        self.executor.finish()
        self.executor.strategy.share_buffers()  # one model is left
        self.checkpoints.saver.memory.free()
        state = self._events.state
        self._context.hooks.log(metrics, None)
        self._reports.end("finished" if state.global_step >= state.max_steps else "stopped", self._trained())
        if self._context.plan.save.load_best_at_end:
            self._context.hooks.load_best_model()
        self._events.fire("on_train_end")
        self.checkpoints.finish()  # a callback may have saved there
        with run_clock().within(UPLOAD):
            self._opener.folder.upload()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _end(self) -> None:
        """Exit if a process was preempted since the last update; check that the last save did not fail. Collective.
        Raises Preempted if one was and the run is saved as it ended, and CheckpointError if it is not saved.
        """
        if self._context.interruption.is_preempted():
            if self._due.is_saved:
                self._due.leave()
            job_logger.warning(
                "preempted after the last update, which was not to be saved: a job that is started again would repeat "
                "it, so the script continues to its end"
            )
        self.checkpoints.check_last()
        if self._context.interruption.epoch_goes_on:
            state = self._events.state
            get_job_logger(SCRIPT_HINTS).warning(
                resume_hint(state.global_step, state.max_steps, self.newest_checkpoint, self._opener.asked)
            )

    def data_ahead(self) -> None:
        """Called before the data of the next update is requested."""
        if self._context.services.fitter.active:
            self._fitter.remember()
        interruption = self._context.interruption
        if interruption.stopped or interruption.preemption_requested:
            interruption.check_wait()

    @property
    def waits_for_data(self) -> bool:
        return self.loop.waits_for_data or self._due.waits_for_data

    @property
    def newest_checkpoint(self) -> Path | None:
        return self.checkpoints.newest

    @property
    def was_interrupted(self) -> bool:
        """True if the user ended the run before its last update."""
        return self._context.interruption.epoch_goes_on

    def end_waits(self) -> None:
        with run_clock().within(UPLOAD):
            end_waits(self._events.handler)

    def save_checkpoint(self, wait: bool) -> None:
        """Save the run; the default of `_save_checkpoint`. After training, wait until the checkpoint is committed, and
        unlock the folder. Collective.
        """
        try:
            with self.executor.averaged():
                loss = self._context.services.loss.facts()
                self.checkpoints.save({"loss": loss, "trained": self._trained()})
            if wait:
                self.checkpoints.finish()  # no later update does, and the process may end
        finally:
            if wait:
                self._opener.folder.release(None)

    def broke_off(self, error: BaseException) -> None:
        """Give up the save under way, unless Ctrl-C ended the run, and record how it ended."""
        if isinstance(error, Exception | SystemExit):
            self.checkpoints.abandon()
        self._reports.end(status_of(error), self._trained(), error)
        self._events.write_reports()

    def release(self) -> None:
        """Release the executor after the run. If it did not come to its end, its process does not wait for uploads."""
        self.end_waits()
        self.executor.release()
        self._reports.close()

    # --- leaving early ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run with this update, and save."""
        self._events.control.should_training_stop = True
        self._context.interruption.stop()

    def _inspect_first(self, group: UpdateBatch) -> int | None:
        """Check the first group, and measure the loss on it; if it does not fit into memory, request smaller
        micro-batches.
        """
        self._check_batches(group)
        try:
            self.steps.begin(group.batches[0], self._fitter.size.accumulation)
        except Exception as error:
            if not self.too_large(error):
                raise
        else:
            self._reports.loss_decided(self._context.services.loss.without_logits.facts())
            self._reports.first_batch(group.batches[0])
            self._events.first_batch(group.batches[0])
            self._context.services.faults.warn_of_length(Fed("training", group.batches[0], group.ids[0]))
            return None
        # Outside the handler: its traceback keeps the memory of the failed attempt alive.
        return self.shrink()

    # --- events -----------------------------------------------------------------------------------------------------

    def epoch_begin(self) -> None:
        self._events.fire("on_epoch_begin")

    def step_begin(self, step: int) -> None:
        events = self._events
        heard = events.handler.begin_step(events.control)
        self.schedule.set(step)
        if "on_step_begin" in heard:
            events.fire("on_step_begin")
            heard = events.handler.heard
        self.steps.heard = heard | {"on_optimizer_step"} if self.schedule.counts_steps else heard

    def step_end(self, batch: UpdateBatch, applied: bool) -> None:
        """Apply signals, count the data, fire `on_step_end`, and do the work that is due."""
        if self._signals.clock_asks or any(batch.signals):
            self._receive(batch.signals)
        self._reports.count(batch)
        self._context.services.engine.step_was_skipped = not applied
        every = self._context.plan.reports.empty_cache_every
        if every and self._events.state.global_step % every == 0:
            self._context.services.accelerator.free_memory()
        if "on_step_end" in self._events.handler.heard:
            self._events.fire("on_step_end")
        self._due.run()

    def epoch_end(self, complete: bool) -> None:
        if complete or not self._context.interruption.epoch_goes_on:
            self._events.fire("on_epoch_end")
        self._due.run()

    def too_large(self, error: Exception) -> bool:
        return self._fitter.too_large(error)

    def shrink(self) -> int:
        report = self._fitter.shrink()
        self._reports.experts.start_over()
        self._use_size(self._fitter.size)
        self.checkpoints.update_size = self._fitter.size.to_dict()
        self._context.hooks.log(dict(report), None)
        self.steps.check_division(self._fitter.size.accumulation)
        return self._fitter.size.accumulation

    # --- non-finite updates -------------------------------------------------------------------------------------------

    def explain_nonfinite(self, suspect: Suspect) -> str:
        return find_nonfinite_samples(suspect, self._context.session.data_ranks)

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        if overflow_alone(result, self._context.session.data_ranks):
            return False
        what = self.explain_nonfinite(suspect)
        if self._context.plan.stability.nonfinite == "rollback":
            self._receive(suspect.data.signals)
            self._context.hooks.log(self.restorer.roll_back(what, self.loop.position), None)
            self.executor.begin()
            return True
        job_logger.warning("%s; this update is skipped", what)
        self._context.hooks.log({"skipped_update": self._events.state.global_step, "reason": what}, None)
        return False

    # --- signals of other ranks ---------------------------------------------------------------------------------------

    def _receive(self, signals: Sequence[float]) -> None:
        if self._signals.apply(signals, self._events.state.global_step).stop:
            self.stop()


class Position:
    """The position of this rank in its data; ranks with loaders of their own are at different positions."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def state_dict(self) -> State:
        return self._loop.position

    def load_state_dict(self, state: State) -> None:
        self._loop.continue_from(state)


# Messages of process-group backends for a lost connection.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process has terminated")


@contextlib.contextmanager
def telling_where(world: World, updates: Callable[[], int], mesh: Mesh | None = None) -> Iterator[None]:
    """Add the rank, its place in the mesh and its number of updates to errors of the body, in a job of several
    processes.
    """
    try:
        yield
    except Exception as error:
        if world.is_distributed:
            place = "" if mesh is None else mesh.place(world.rank)
            at = f" ({place})" if place else ""
            error.add_note(f"This was rank {world.rank} of {world.size}{at}, at step {updates()}.")
            if isinstance(error, DistError) or any(words in str(error) for words in _LOST):
                error.add_note("Another rank ended first, or never came: look for its own error.")
        raise
