"""The training of one call of `train()`: its beginning and end, and the work at the events of its loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from windlass.accelerator.saved_parts import Generators, check_savable
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint
from windlass.core.errors import CheckpointError, ConfigError
from windlass.core.events import TrainerState
from windlass.core.logs import SCRIPT_HINTS, get_job_logger
from windlass.core.mesh import Mesh
from windlass.core.run_clock import SAVE, UPLOAD, Moment, run_clock
from windlass.core.script_command import resume_hint
from windlass.core.types import TrainOutput
from windlass.core.world import World
from windlass.data.update_batch import UpdateBatch
from windlass.dist.ending import lost_another_rank
from windlass.dist.lockstep import together
from windlass.engine.executor import StepResult
from windlass.engine.feed import Counts
from windlass.engine.loop import LoopHooks, Suspect
from windlass.metrics.tokens import InputCounter
from windlass.trainer.batch_faults import BatchFaults, Fed
from windlass.trainer.best_tracker import find_metric
from windlass.trainer.blame import find_nonfinite_samples, overflow_alone
from windlass.trainer.continuing import ForeignPlace, restore_foreign
from windlass.trainer.drawn_samples import DrawnSamples
from windlass.trainer.due_work import DueWork, SignalExchange
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.interruption import WaitBrokenOff
from windlass.trainer.micro_steps import MicroSteps
from windlass.trainer.resuming import saved_loss
from windlass.trainer.run import Run
from windlass.transforms.neftune import noisy_embeddings
from windlass.transforms.overflow_watch import watching

job_logger = get_job_logger(__name__)


class RunTraining(LoopHooks):
    """Moves a run from its beginning to its end, with the methods of its Trainer. Nothing refers to it afterwards.

    Args:
        pad_token: the id that input counts leave out; None if there is none.
    """

    def __init__(self, run: Run, hooks: TrainHooks, pad_token: int | None) -> None:
        context = run.context
        self._run, self._hooks, self._context, self._events = run, hooks, context, context.events
        self._executor, self._schedule, self._reports = run.executor, run.schedule, run.reports
        self._signals = SignalExchange(context.all_ranks, context.interruption, run.checkpoints)
        self._due = DueWork(run, hooks, self._signals)
        self._work = self._due.run
        if hooks.has_own_work:
            self._work = self._due.run_by_script if hooks.works_around else self._due.run_by_copy
        self.steps: MicroSteps = MicroSteps(context, hooks)
        self._has_own_rate = "_get_learning_rate" in hooks.overridden
        main_input = getattr(context.files.model, "main_input_name", "input_ids")
        inputs = InputCounter(main_input, context.plan.reports.tokens, pad_token)
        faults = context.services.faults
        check = partial(_check_batches, faults) if faults.checks_ahead else None
        draw = hooks.loss.draw
        drawn = None if draw is None else DrawnSamples(draw, context.session.data_ranks.sum)
        self.counts = Counts(hooks.loss.count_targets, inputs, self._signals.own, check, hooks.flops, drawn)

    # --- from beginning to end --------------------------------------------------------------------------------------

    def execute(self, checkpoint: Checkpoint | None, place: ForeignPlace | None) -> TrainOutput:
        """Train, from a checkpoint's state or from the beginning. `place` is the position in this run's data if
        `checkpoint` is of a run of transformers' Trainer.
        """
        context, state = self._context, self._events.state
        hooks, run, model = self._hooks, self._run, context.files.model
        with context.services.evaluator.during(self._executor):
            run.restorer.continued = checkpoint
            if checkpoint is not None:
                hooks.load_weights(str(checkpoint.folder))
                with hooks.restoring_generators(str(checkpoint.folder), Generators(context.session.device)):
                    self._restore(checkpoint, place)
            run.first_tokens = state.num_input_tokens_seen
            hooks.load_training_state(None if checkpoint is None else str(checkpoint.folder))
            self._signals.saved(state.global_step)
            self._reports.announce(run.samples)
            self._check_metric()
            self._check_savable()
            with (
                context.interruption.taking_ctrl_c(run),
                telling_where(context.session.world, lambda: state.global_step, context.all_ranks.mesh),
                self._reports.counting(),
                noisy_embeddings(model, context.plan.transforms.neftune_alpha),
                watching(model, context.plan.stability.watch_forwards),
            ):
                started = Moment()
                saved = None if checkpoint is None else checkpoint.meta.get("trained")
                self._reports.begin(saved, hooks.data_facts)
                self._train(started)
            output = self._finish(started)
            self._end()
        return output

    def _restore(self, checkpoint: Checkpoint, place: ForeignPlace | None) -> None:
        restore_args = self._context.plan.reports.restore_callback_args
        if not isinstance(checkpoint, ForeignCheckpoint):
            self._context.services.loss.begin_run(saved_loss(checkpoint))
            self._run.restorer.restore(checkpoint, restore_args)
            return
        assert place is not None, "the place was found before the plan was made"
        self._events.adopt(TrainerState.from_dict(checkpoint.state))
        self._run.restorer.find_best(checkpoint)
        restore_foreign(
            checkpoint,
            place,
            self._context.files.model,
            self._executor.optimizer,
            self._schedule,
            self._executor,
            self._run.loop,
        )
        self._run.seed_step.start(checkpoint.step)
        self._events.restore_callbacks(restore_args)

    def _check_savable(self) -> None:
        """Check before the first update that the model, its configurations and the state of the script's own objects
        can be saved. Collective. A run that saves nothing goes on, for its script may not either.
        """
        save, files = self._context.plan.save, self._context.files
        if save.cadence.strategy == "no" and save.every is None:
            if self._context.all_ranks.rank == 0:
                try:
                    files.check_configurations("")
                except CheckpointError as error:
                    job_logger.warning("save_model will fail: %s", error)
            return

        def check() -> None:
            if self._context.all_ranks.rank == 0:
                files.check_savable()
            if save.model_only:
                return
            check_savable("lr_scheduler", self._schedule.exposed, self._schedule)
            for owner in self._context.services.accelerator.registered_objects:
                check_savable("accelerator.register_for_checkpointing", owner, owner)

        together(self._context.all_ranks, check)

    def _check_metric(self) -> None:
        """Check before the first update that evaluation returns the metric that the run needs."""
        plan, hooks = self._context.plan, self._hooks
        metric = plan.save.metric or ("loss" if self._schedule.follows_metric else None)
        if metric is None or plan.evaluation.strategy == "no" or not hooks.rehearses:
            return
        metrics = hooks.rehearse(metric, self._executor.strategy)
        try:
            find_metric(metrics, metric)
        except ConfigError:
            # A callback of the script may add it, once it is called with the metrics.
            if not self._context.events.handler.listens_outside("on_evaluate"):
                raise

    def _train(self, started: Moment) -> None:
        context, events = self._context, self._events
        interruption, save = context.interruption, self._hooks.save_checkpoint
        events.fire("on_train_begin")
        # A callback makes its average in `on_train_begin`.
        self._executor.average_by(events.average())
        if context.plan.reports.evaluate_first and events.state.global_step == 0:
            # A schedule that follows the metric ignores it: no update was made yet.
            self._due.evaluate_or_stop(starting=True)
        if interruption.stopped:
            events.control.should_training_stop = True  # which the first event of a run clears
        self._reports.load_watch.look(training=False)
        events.find_deciding_callbacks(self._hooks.has_own_work)
        if interruption.is_preempted():
            self._due.leave()  # nothing is to be saved
        self._due.begin(started)
        self._executor.model.train()
        self._executor.begin()
        try:
            self._run.loop.run(self)
        except WaitBrokenOff:
            if interruption.stopped:
                self._due.save_stopped()
            else:
                self._due.save_and_leave()
        if interruption.stopped:
            save()  # stopped before the first update: the loop did not save
        if interruption.is_preempted():
            self._due.save_and_leave()
        self._run.checkpoints.finish_last(save)

    def _finish(self, started: Moment) -> TrainOutput:
        """Report, load the best model, and fire `on_train_end`."""
        # Training is over: what follows does not count as computation.
        run_clock().enter(SAVE)
        metrics = self._reports.summary(started)
        self._executor.finish()
        self._executor.strategy.share_buffers()  # one model is left
        self._run.checkpoints.saver.memory.free()
        state = self._events.state
        metrics.update(self._hooks.reported_figures())
        self._hooks.log(metrics, None)
        self._reports.end(
            "finished" if state.global_step >= state.max_steps else "stopped", self._run.trained()
        )
        if self._context.plan.save.load_best_at_end:
            self._hooks.load_best_model()
        self._events.fire("on_train_end")
        self._run.checkpoints.finish()  # a callback may have saved there
        with run_clock().within(UPLOAD):
            self._run.opener.folder.upload()
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
        self._run.checkpoints.check_last()
        if self._context.interruption.epoch_goes_on:
            state = self._events.state
            get_job_logger(SCRIPT_HINTS).warning(
                resume_hint(
                    state.global_step, state.max_steps, self._run.newest_checkpoint, self._run.opener.asked
                )
            )

    # --- its data ---------------------------------------------------------------------------------------------------

    def data_ahead(self) -> None:
        """Called before the data of the next update is requested."""
        if self._context.services.fitter.active:
            self._run.fitter.remember()
        interruption = self._context.interruption
        if interruption.stopped or interruption.preemption_requested:
            interruption.check_wait()

    def inspect(self, group: UpdateBatch) -> int | None:
        """Check the first group, and measure the loss on it; if it does not fit into memory, request smaller
        micro-batches.
        """
        faults, batch = self._context.services.faults, group.batches[0]
        _check_batches(faults, group)
        try:
            self.steps.begin(batch, self._run.fitter.size.accumulation, group.ids[0])
        except Exception as error:
            if not self.too_large(error):
                raise
        else:
            self._reports.loss_decided(self._context.services.loss.without_logits.facts())
            self._reports.first_batch(batch)
            self._events.first_batch(batch, self._hooks.data_samples)
            faults.warn_of_length(Fed("training", batch, group.ids[0]))
            return None
        # Outside the handler: its traceback keeps the memory of the failed attempt alive.
        return self.shrink()

    # --- events -----------------------------------------------------------------------------------------------------

    def epoch_begin(self, resumed: bool) -> None:
        if resumed:
            self._events.enter_resumed_epoch()
        else:
            self._events.fire("on_epoch_begin")
        self._events.merge_flags()  # the epoch may end before its first update

    def step_begin(self, step: int) -> None:
        events = self._events
        heard = events.handler.begin_step(events.control)
        self._schedule.set(step)
        if self._has_own_rate:
            self._reports.own_rate = self._hooks.learning_rate()
        if "on_step_begin" in heard:
            events.fire("on_step_begin")
            heard = events.handler.heard
        # The executor calls `stepped`, which steps such a schedule, only if this event is heard.
        self.steps.heard = heard | {"on_optimizer_step"} if self._schedule.counts_steps else heard

    def step_end(self, batch: UpdateBatch, applied: bool) -> None:
        """Apply signals, count the data, fire `on_step_end`, and do the work that is due."""
        # Without signals, too, if the clock requested a save the last time: that is over now.
        if self._signals.clock_asks or any(batch.signals):
            self._receive(batch.signals)
        self._reports.count(batch)
        self._context.services.engine.step_was_skipped = not applied
        every = self._context.plan.reports.empty_cache_every
        if every and self._events.state.global_step % every == 0:
            self._context.services.accelerator.free_memory()
        self._schedule.end_update(self._events.state.global_step)
        if "on_step_end" in self._events.handler.heard:
            self._events.fire("on_step_end")
        self._work()

    def epoch_end(self, complete: bool) -> None:
        if complete or not self._context.interruption.epoch_goes_on:
            self._events.fire("on_epoch_end")
        self._work()

    def too_large(self, error: Exception) -> bool:
        return self._run.fitter.too_large(error)

    def shrink(self) -> int:
        fitter = self._run.fitter
        report = fitter.shrink()
        self._reports.experts.start_over()
        self._run.use_size(fitter.size)
        self._run.checkpoints.update_size = fitter.size.to_dict()
        self._hooks.log(dict(report), None)
        self.steps.check_step(fitter.size.accumulation)
        return fitter.size.accumulation

    # --- non-finite updates -------------------------------------------------------------------------------------------

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        if overflow_alone(result, self._context.session.data_ranks):
            return False
        what = find_nonfinite_samples(suspect, self._context.session.data_ranks)
        if self._context.plan.stability.nonfinite == "rollback":
            # `step_end`, which does this otherwise, is not called after a rollback.
            self._receive(suspect.data.signals)
            self._hooks.log(self._run.restorer.roll_back(what, self._run.loop.position), None)
            self._executor.begin()  # a checkpoint holds averaged weights, if there are any
            return True
        job_logger.warning("%s; this update is skipped", what)
        self._hooks.log({"skipped_update": self._events.state.global_step, "reason": what}, None)
        return False

    # --- signals of other ranks ---------------------------------------------------------------------------------------

    def _receive(self, signals: Sequence[float]) -> None:
        if self._signals.apply(signals, self._events.state.global_step).stop:
            self._run.stop()


def _check_batches(faults: BatchFaults, group: UpdateBatch) -> None:
    for batch, ids in zip(group.batches, group.ids, strict=True):
        faults.check(Fed("training", batch, ids))


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
            if lost_another_rank(error):
                error.add_note("Another rank ended first, or never came: look for its own error.")
        raise
