"""One call of `train()`: the engine's parts, built for it, and the Trainer's methods handed to them as hooks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.assemble.build import Built
from windlass.checkpoint.background import Counters
from windlass.config.plan import RunPlan
from windlass.core.clock import Moment
from windlass.core.device import visible_devices
from windlass.core.events import CONTROL_FLAGS, TrainerControl, TrainerState
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.rng import StepSeeder
from windlass.core.threads import LoadWatch, processes_and_threads
from windlass.core.types import State
from windlass.data.group import Group
from windlass.dist.beacon import beacon
from windlass.engine.attentive import EvaluationAbandoned, attentive
from windlass.engine.executor import StepRequest, StepResult
from windlass.engine.feed import Counts, Feed, GroupSource, Portion
from windlass.engine.loop import Loop, LoopOptions, Suspect
from windlass.metrics.ledger import FiniteWatch, Ledger
from windlass.metrics.tokens import InputCounter
from windlass.trainer.agreement import Signals
from windlass.trainer.blame import overflow_alone, who_is_to_blame
from windlass.trainer.companions import Companions
from windlass.trainer.memory import Fitting
from windlass.trainer.own_division import DivisionWatch, may_divide
from windlass.trainer.parts import TrainerParts
from windlass.trainer.rollback import roll_back
from windlass.trainer.run_saver import RunSaver

logger = get_logger(__name__)


class TrainingRun:
    """Implements `engine.loop.LoopHooks` on a Trainer, whose overridable methods it calls.

    Attributes:
        executor, schedule, loop, ledger: the run's parts, whose states make up a checkpoint.
        saver, companions: what writes it.
    """

    def __init__(self, trainer: TrainerParts, plan: RunPlan, built: Built, source: GroupSource) -> None:
        self._trainer, self._plan = trainer, plan
        self._fitting = Fitting(trainer, source, built.executor)
        self.executor, self.schedule = built.executor, built.schedule
        device = trainer._device
        self.saver = RunSaver(
            trainer._checkpoint_manager(), plan.save, trainer._gang, device, trainer._may_save_in_background
        )
        self.companions = Companions()
        self.unfinished = {}
        self.ledger = Ledger(device, trainer._gang.sum)
        self._normaliser = trainer._normaliser
        self._flops_per_position = 6 * trainer._parameter_count
        self._empty_cache_every = trainer.args.torch_empty_cache_steps
        self._started = Moment()
        self._beacon = beacon()
        self._load_watch = LoadWatch(processes_and_threads(plan.data.workers))
        self._log_takes_start = len(inspect.signature(trainer.log).parameters) > 1  # older overrides do not
        accumulation = plan.batch.accumulation
        self._division_watch = self._watch_of_division(accumulation)
        self.seed_step = StepSeeder(plan.seed, plan.batch.rank, device)
        self.seed_step.start(0)
        self.loop = Loop(
            built.executor,
            Feed(source, accumulation, self._counts(), trainer._gang, built.executor.strategy.sharded),
            self,
            trainer.state,
            self.ledger,
            FiniteWatch(device),
            self.seed_step,
            LoopOptions(
                epochs=plan.duration.epochs,
                max_grad_norm=plan.stability.max_grad_norm,
                guard=plan.stability.nonfinite != "raise",
            ),
        )

    def _watch_of_division(self, accumulation: int) -> DivisionWatch | None:
        if not may_divide(self._trainer, accumulation):
            return None
        return DivisionWatch(self._trainer, accumulation)

    def _counts(self) -> Counts:
        trainer = self._trainer
        inputs = InputCounter(
            getattr(trainer.model, "main_input_name", "input_ids"),
            getattr(trainer.processing_class, "pad_token_id", None),
        )
        mode = str(
            getattr(
                trainer.args.include_num_input_tokens_seen,
                "value",
                trainer.args.include_num_input_tokens_seen,
            )
        )
        tokens = {"no": lambda _: 0, "all": inputs.positions, "non_padding": inputs.real}[mode]
        return Counts(trainer.count_targets, tokens, inputs.positions, self._inspect_first, self._signals)

    def adopt_state(self, state: TrainerState) -> None:
        """A resumed run's progress replaces the fresh one."""
        self.loop.adopt_state(state)
        self._no_clock_before = state.global_step

    # --- before the first update ------------------------------------------------------------------------------------

    def _inspect_first(self, group: Group) -> int | None:
        try:
            self._inspect(group)
        except Exception as error:
            if not self.too_large(error):
                raise
        else:
            return None
        return self.shrink()  # outside the handler, whose traceback holds on to all that did not fit

    def _inspect(self, group: Group) -> None:
        self._trainer._probe_loss(group.batches[0], training=True)
        needed = self._trainer.loss_takes_denominator
        self._count_for_hooks = self._trainer._denominator if needed else _no_count
        with self._trainer.accelerator.discarding():
            self.executor.settle(lambda: self._discarded_backward(group.batches[0]))

    def _discarded_backward(self, batch: Any) -> Tensor:
        targets = self._trainer.count_targets(batch)
        self._normaliser.begin(targets, filler=False)
        request = StepRequest(max(targets, 1.0), [targets], [1], 1.0, None, False)
        return self.micro_step(batch, 0, request)

    # --- the user's part of a step ----------------------------------------------------------------------------------

    def micro_step(self, batch: Any, index: int, request: StepRequest) -> Tensor:
        """The Trainer's `training_step` on one micro-batch; the loss is what went to backward, normalised."""
        trainer, normaliser = self._trainer, self._normaliser
        filler = request.total_samples > 0 and request.samples[index] == 0
        if index == 0:
            normaliser.begin(request.denominator, filler)
        last = index == len(request.targets) - 1
        share = request.samples[index] / max(request.total_samples, 1.0)
        normaliser.scope(request.targets[index], share, last, filler)
        trainer.accelerator.sync_gradients = last
        count = self._count_for_hooks(request.denominator, trainer._device)
        if self._division_watch is None:
            self._training_step(batch, count)
        elif self._division_watch.run(lambda: self._training_step(batch, count)):
            self._division_watch = None
        return normaliser.take()

    def _training_step(self, batch: Any, count: Tensor | None) -> None:
        trainer = self._trainer
        if trainer._training_step_takes_denominator:
            trainer.training_step(trainer.model_wrapped, batch, num_items_in_batch=count)
        else:
            trainer.training_step(trainer.model_wrapped, batch)

    def rescale(self, request: StepRequest) -> Tensor | None:
        total = self._normaliser.total
        if total is not None:
            return self._normaliser.denominator / total
        if self._trainer._plain_mean_unsaid:
            self._trainer._say_plain_mean()
        return None

    def parts(self) -> dict[str, Tensor]:
        return self._normaliser.parts

    def backward(self, loss: Any) -> None:
        """What `accelerator.backward` does in this run."""
        if self._division_watch is not None:
            self._division_watch.given_to_backward(loss)
        normaliser = self._normaliser
        scaled = normaliser.apply(loss)
        if normaliser.parts:
            self._backward_of_parts()
        self.executor.backward(scaled)

    def _backward_of_parts(self) -> None:
        """Auxiliary terms of all micro-batches but the last go their own way; see `Normaliser`."""
        apart = self._normaliser.take_apart()
        if apart is not None:
            self.executor.backward_apart(apart)
        elif self._normaliser.last:
            self.executor.join_apart(self._normaliser.correction)

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def control(self) -> TrainerControl:
        return self._trainer.control

    def _fire(self, event: str) -> None:
        trainer = self._trainer
        if trainer.callback_handler.listens(event):
            trainer.control = trainer.callback_handler.fire(
                event, trainer.args, trainer.state, trainer.control
            )

    def epoch_begin(self) -> None:
        self._fire("on_epoch_begin")

    def data_ahead(self) -> None:
        self._fitting.remember()

    def too_large(self, error: Exception) -> bool:
        return self._fitting.too_large(error)

    def shrink(self) -> int:
        accumulation = self._fitting.shrink()
        self._division_watch = self._division_watch or self._watch_of_division(accumulation)
        return accumulation

    def step_begin(self) -> None:
        self._fire("on_step_begin")

    def substep_end(self) -> None:
        self._fire("on_substep_end")

    def pre_optimizer_step(self) -> None:
        self._fire("on_pre_optimizer_step")

    def optimizer_step(self) -> None:
        self._fire("on_optimizer_step")

    _flags_may_differ = False

    def training_began(self) -> None:
        """The callbacks were told that training begins: what some of them ask for from here on, all ranks do."""
        trainer = self._trainer
        self._load_watch.look(training=False)
        if trainer._gang.size > 1:
            own = [not type(c).__module__.startswith("windlass.") for c in trainer.callback_handler.callbacks]
            self._flags_may_differ = bool(trainer._gang.sum(torch.tensor(float(any(own)))))
            self._agree_on_flags()

    def _agree_on_flags(self) -> None:
        """What a callback of one rank asks for, all ranks do: saving, evaluating and ending need every one of them.

        Our own callbacks decide alike everywhere; this exchange is made only where a script brought others.
        """
        if self._flags_may_differ:
            control = self.control
            wishes = self._trainer._gang.start_sum([float(getattr(control, name)) for name in CONTROL_FLAGS])
            for name, count in zip(CONTROL_FLAGS, wishes.wait(), strict=True):
                setattr(control, name, count > 0)

    def step_end(self) -> None:
        self._fire("on_step_end")
        self._agree_on_flags()

    def epoch_end(self, complete: bool) -> None:
        if complete or not self._trainer._resumes_within_epoch:
            self._fire("on_epoch_end")
        self._agree_on_flags()

    # --- what the loop asks for -------------------------------------------------------------------------------------

    def set_learning_rate(self, step: int) -> None:
        self.schedule.set(step)

    samples_done = 0.0
    updates_done = 0

    def update_applied(self, portion: Portion, applied: bool) -> None:
        """Counts that follow an update: tokens, FLOPs, and the step of a schedule that keeps its own count."""
        state = self._trainer.state
        self.samples_done += portion.total_samples
        self.updates_done += 1
        state.num_input_tokens_seen += int(portion.tokens)
        state.total_flos += self._flops_per_position * portion.positions
        self._trainer._loop_engine.step_was_skipped = not applied
        if self._empty_cache_every and state.global_step % self._empty_cache_every == 0:
            self._trainer.accelerator.free_memory()
        if applied:
            self.schedule.advance()

    def explain_nonfinite(self, suspect: Suspect) -> str:
        return who_is_to_blame(suspect, self._trainer._gang)

    def update_refused(self, suspect: Suspect, result: StepResult) -> bool:
        if overflow_alone(result, self._trainer._gang):
            return False
        what = self.explain_nonfinite(suspect)
        if self._plan.stability.nonfinite == "rollback":
            roll_back(self._trainer, what)
            return True
        get_job_logger(__name__).warning("%s; this update is skipped", what)
        self._trainer.log({"skipped_update": self._trainer.state.global_step, "reason": what})
        return False

    def _signals(self) -> Signals:
        trainer, saver = self._trainer, self.saver
        due = trainer._gang.rank == 0 and saver.is_due()
        return Signals(trainer._wants_stop, trainer._told_to_leave, due, *saver.counters())

    def signals_agreed(self, signals: Sequence[float]) -> None:
        told = Signals(*signals)
        if told.stop:
            self._trainer._stop_here()
        self._heard(told)

    def _heard(self, told: Signals) -> None:
        """What all ranks know by now, in training or in an evaluation."""
        trainer = self._trainer
        # One process need not wait for what it told itself with the data of this update.
        trainer._leaving = told.leave > 0 or (trainer._gang.size == 1 and trainer._told_to_leave)
        if self.saver.busy:
            self.saver.agreed(Counters(told.written, told.settled, told.failed))
        self._clock_asks = told.save_due > 0
        # What was sent before a save began still asks for it. And what a checkpoint of the plan was resumed from, one
        # of the clock does not replace.
        self._ephemeral_due = (
            self._clock_asks and trainer.state.global_step - self._no_clock_before > 1 and not self.saver.busy
        )

    def due(self) -> None:
        """Log, evaluate, save: in this order, each where a callback or the cadence asked for it."""
        control = self._trainer.control
        if control.should_log:
            self._beacon.call("log")
            self.log_progress()
            self._agree_on_flags()
        if self._trainer.control.should_evaluate:
            self._beacon.call("evaluate")
            self._evaluate()
            self._agree_on_flags()
        leaving = self._trainer._leaving
        if self._trainer.control.should_save or self._trainer._interrupted or self._ephemeral_due or leaving:
            self._beacon.call("save")
            self._save()
            self._agree_on_flags()
        if leaving:
            self._trainer._leave()

    _ephemeral_due = _clock_asks = False
    _no_clock_before = 0
    _saved_step = 0

    @property
    def is_saved(self) -> bool:
        """Whether the run saved, or tried to, at the step where it stands."""
        return self._saved_step == self._trainer.state.global_step

    def _save(self) -> None:
        trainer = self._trainer
        retry = self.saver.retry
        planned = trainer.control.should_save or trainer._interrupted or trainer._leaving
        trainer._saves_ephemeral = not (planned or retry.owes_ordinary)
        retry.begin(trainer.state.global_step, self._clock_asks, ordinary=not trainer._saves_ephemeral)
        self._ephemeral_due = False
        self._saved_step = self._no_clock_before = trainer.state.global_step
        self.loop.check_finite()
        trainer._save_checkpoint(trainer.model)
        trainer._saves_ephemeral = False  # what a script saves by itself is not the clock's
        trainer._interrupted = trainer.control.should_save = False

    def log_progress(self) -> None:
        """Report the losses since the last report; nothing where there is none."""
        report = self.ledger.read()
        if not report:
            return
        self._load_watch.look(training=True)
        rates = self.schedule.last_lrs()
        logs = {**report, "learning_rate": rates[0] if rates else 0.0}
        if self.ledger.skipped:
            logs["skipped_updates"] = self.ledger.skipped
        if self._log_takes_start:
            self._trainer.log(logs, self._started)
        else:
            self._trainer.log(logs)

    # What a run that was told to leave in an evaluation has not done at its last step: a resumed run makes it up.
    unfinished: State

    def make_up(self) -> None:
        """Do what the run left undone at the step it was resumed from."""
        unfinished, self.unfinished = self.unfinished, {}
        if not unfinished:
            return
        evaluates = self._trainer._has_evaluation_data
        if not evaluates:
            get_job_logger(__name__).warning(
                "the evaluation that the run left at step %d is not made up: there is no evaluation data now",
                self._trainer.state.global_step,
            )
        control = self._trainer.control
        control.should_evaluate, control.should_save = evaluates, unfinished["save"]
        self.due()

    def leave_here(self) -> None:
        """The run was told to leave while it waited for data, or after its last update: what was done so far is what is
        saved.
        """
        self._trainer._leaving = True
        if not self.is_saved:
            self._save()
        self._trainer._leave()

    def watch_evaluation(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """The batches of an evaluation, which all ranks leave when one of them is told to."""

        def heard(sums: Sequence[float]) -> None:
            self._heard(Signals(*sums))
            if self._trainer._leaving:
                raise EvaluationAbandoned

        in_step = self._trainer._evaluates_in_step
        return attentive(batches, self._trainer._gang, self._signals, heard, in_step=in_step)

    def _states_of_callbacks(self) -> State:
        """As they are now; none where they cannot be copied, and so not be saved either, which a save will say."""
        try:
            return copy.deepcopy(self._trainer.callback_handler.state_dict())
        except Exception as error:
            logger.debug("states of callbacks cannot be copied: %r", error)
            return {}

    def _evaluate(self) -> None:
        trainer = self._trainer
        logged, states = len(trainer.state.log_history), self._states_of_callbacks()
        try:
            metrics = trainer._evaluate_for_run()
        except EvaluationAbandoned:
            # It is made again from its start, and what it told so far is told again.
            del trainer.state.log_history[logged:]
            trainer.callback_handler.load_state_dict(states)
            self.unfinished = {"save": trainer.control.should_save}
            return
        save = self._plan.save
        if save.load_best_at_end or trainer.args.keep_best:
            trainer._finish_saving()  # the best is one of those that stand
        new_best = trainer._determine_best_metric(metrics)
        kept = trainer._is_kept_as_best()
        if save.cadence.strategy == "best":
            trainer.control.should_save = new_best or kept
        elif kept or (new_best and save.load_best_at_end):
            # Kept whatever the save stride is: otherwise the best weights would be gone by the time they are asked
            # for.
            trainer.control.should_save = True

    def finish(self) -> None:
        """Read what the last report did not cover, so that the run's mean loss covers every update; leave one model."""
        self.ledger.read()
        self.executor.strategy.share_buffers()


def _no_count(value: float, device: Any) -> None:
    return None


def announce(trainer: TrainerParts, plan: RunPlan) -> None:
    """Say what is about to happen, and what this process leaves unused."""
    logger.info("***** Running training *****")
    examples = trainer._source_samples
    logger.info(
        "  samples: %s, updates: %d", "a stream" if examples is None else examples, plan.duration.steps
    )
    logger.info("  samples in one update: %d = %d x %d micro-batches x %d processes",
                plan.batch.update, plan.batch.micro, plan.batch.accumulation, plan.batch.world)  # fmt: skip
    spare = visible_devices() - trainer._world.local_size
    if trainer._device.type not in ("cpu", "mps") and spare > 0 and trainer._world.is_local_main:
        total = visible_devices()
        logger.warning(
            "%d accelerators are visible and this job uses %d. To use them all, start the script with: "
            "torchrun --nproc-per-node %d SCRIPT", total, trainer._world.local_size, total
        )  # fmt: skip
