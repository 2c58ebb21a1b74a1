"""The state of a run, its control flags, and the events that callbacks see."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from windlass.callbacks.answers_log import AnswersLog
from windlass.callbacks.handler import CallbackHandler
from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.callbacks.progress import ProgressCallback
from windlass.callbacks.report import ReportCallback
from windlass.callbacks.samples_log import Samples, SamplesLog
from windlass.callbacks.saved_state import CONTROL_ENTRY, export_states, import_states
from windlass.callbacks.weight_averaging import SWACallback
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import RunPlan
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, Problem
from windlass.core.events import CONTROL_FLAGS, RunProgress, TrainerControl, TrainerState
from windlass.core.logs import get_logger
from windlass.core.run_clock import CALLBACKS, EXCHANGE, run_clock
from windlass.trainer.plans import Plans
from windlass.trainer.session import Session

logger = get_logger(__name__)

# Settings of the present run, which a checkpoint's state does not replace.
_OF_THIS_RUN = (
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    *TrainerState.PER_PROCESS,
)
# Arguments that scripts of transformers change while a run trains, in vain here.
_READ_ONCE = (
    "eval_steps",
    "gradient_accumulation_steps",
    "learning_rate",
    "logging_steps",
    "max_grad_norm",
    "max_steps",
    "metric_for_best_model",
    "num_train_epochs",
    "per_device_train_batch_size",
    "save_steps",
    "save_total_limit",
    "weight_decay",
)


class Events(RunProgress):
    """Owns the state, control flags and callbacks of a Trainer, and fires all events. Callbacks get the arguments of
    `plans`, which a script may replace at any time.

    Attributes:
        flags_may_differ: callbacks of a script's own may set flags on one rank alone.
    """

    def __init__(self, plans: Plans, session: Session, handler: CallbackHandler) -> None:
        self._plans, self._all_ranks, self._world = plans, session.all_ranks, session.world
        self.handler, self._clock = handler, run_clock()
        self.flags_may_differ = False
        self.begin_run()

    def begin_run(self) -> None:
        """Start with a new state and no control flags."""
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self._world.is_local_main, is_world_process_zero=self._world.is_main
        )

    def use_plan(self, plan: RunPlan) -> None:
        """Set the settings of a run in the state, for callbacks."""
        state = self.state
        state.max_steps, state.num_train_epochs = plan.duration.steps, plan.duration.epochs
        state.logging_steps, state.eval_steps = plan.logging.steps, plan.evaluation.steps
        state.save_steps = plan.save.cadence.steps

    def read_once(self) -> dict[str, Any]:
        """The present values of arguments that a run reads as it begins, and transformers in every update."""
        return {name: getattr(self._plans.args, name) for name in _READ_ONCE}

    def adopt(self, saved: TrainerState) -> None:
        """Copy a checkpoint's progress into the state object, except settings of this run and this process."""
        for item in dataclasses.fields(saved):
            if item.name not in _OF_THIS_RUN:
                setattr(self.state, item.name, getattr(saved, item.name))

    def fire(self, event: str, state: TrainerState | None = None, **payload: Any) -> None:
        """Call the callbacks with `state`, by default the present one."""
        before = self._clock.enter(CALLBACKS)
        try:
            self.control = self.handler.fire(
                event, self._plans.args, state or self.state, self.control, **payload
            )
        finally:
            self._clock.enter(before)

    def enter_resumed_epoch(self) -> None:
        """Call `on_epoch_begin` of the callbacks that no checkpoint restores: they have not seen this epoch begin."""
        with self._clock.within(CALLBACKS):
            self.handler.enter_resumed_epoch(self._plans.args, self.state, self.control)

    def add_log(self, logs: dict[str, Any]) -> None:
        """Append a row to the history and report it."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def find_deciding_callbacks(self, method: bool) -> None:
        """Check if any rank has callbacks of a script's own, whose flags may differ; `method`: a method of the script
        may set them, too. Collective.
        """
        if self._all_ranks.size > 1:
            own = [method, *(not type(c).__module__.startswith("windlass.") for c in self.handler.callbacks)]
            self.flags_may_differ = bool(self._all_ranks.sum(torch.tensor(float(any(own)))))
            # Those that were set before this is called, in `on_train_begin`.
            self.merge_flags()

    @contextlib.contextmanager
    def on_save_by_commits(self, saved_step: Callable[[], int | None]) -> Iterator[None]:
        """Within the body, an `on_save` that a script fires is left to the commit of the checkpoint, if the run saved
        this step; `saved_step`: the step that it saved last.
        """
        on_save = self.handler.on_save

        def of_script(
            args: TrainingArguments, state: TrainerState, control: TrainerControl
        ) -> TrainerControl:
            if saved_step() != state.global_step:  # the script's `_save_checkpoint` saves otherwise
                return on_save(args, state, control)
            control.should_save = False
            return control

        with attributes_of(self.handler, on_save=of_script):
            yield

    def merge_flags(self) -> None:
        """Set each flag that a callback of any rank set. Windlass's own callbacks set the same flags on every rank, so
        nothing is exchanged without others. Collective.
        """
        if self.flags_may_differ:
            wishes = self._all_ranks.start_sum([float(getattr(self.control, name)) for name in CONTROL_FLAGS])
            with self._clock.within(EXCHANGE):
                merged = wishes.wait()
            for name, count in zip(CONTROL_FLAGS, merged, strict=True):
                setattr(self.control, name, count > 0)

    def average(self) -> SWACallback | None:
        """The callback that averages weights, if there is one. Raises ConfigError for several."""
        found = self.handler.of_kind(SWACallback)
        if len(found) > 1:
            fix = "a run evaluates and saves one average of its weights: leave one of these out"
            raise ConfigError(Problem("callbacks", ", ".join(type(one).__name__ for one in found), fix))
        return found[0] if found else None

    def show(self, **objects: Any) -> None:
        """Set the keyword arguments of all events: `model`, `optimizer`, `train_dataloader`, ..."""
        for name, value in objects.items():
            setattr(self.handler, name, value)

    # --- in checkpoints ---------------------------------------------------------------------------------------------

    def saved_state(self) -> dict[str, Any]:
        """The fields of the state, with the states of callbacks. The history is the live list."""
        # transformers, where it continues the run, looks for the flags at its first save.
        flags = {
            "args": {name: bool(getattr(self.control, name)) for name in CONTROL_FLAGS},
            "attributes": {},
        }
        self.state.stateful_callbacks = {**self.handler.state_dict(), CONTROL_ENTRY: flags}
        return {item.name: getattr(self.state, item.name) for item in dataclasses.fields(self.state)}

    def restore_callbacks(self, restore_args: bool) -> None:
        """Restore the states of callbacks from the adopted state."""
        self.handler.load_state_dict(self.state.stateful_callbacks, restore_args=restore_args)

    def remember_callbacks(self) -> Callable[[], None]:
        """Return what puts the states of callbacks back as they are now, after an evaluation. Averages of weights are
        left out: evaluations do not change them, and a copy would need the memory of the model.
        """
        callbacks = [one for one in self.handler.callbacks if not isinstance(one, SWACallback)]
        try:
            states = copy.deepcopy(export_states(callbacks))
        except Exception as error:  # so it is not saved either: a save reports it
            logger.debug("states of callbacks cannot be copied: %r", error)
            return lambda: None
        return partial(import_states, callbacks, states, restore_args=False)

    def roll_back_metrics_log(self) -> None:
        for log in self.handler.of_kind(MetricsLogCallback):
            log.roll_back(self.state)
        for answers in self.handler.of_kind(AnswersLog):
            answers.roll_back(self.state)

    def first_batch(self, batch: Any, samples: Callable[[Any], Samples]) -> None:
        """Show the first batch of a call of `train()` to what keeps its rows, which `samples` returns."""
        for callback in self.handler.of_kind(SamplesLog):
            callback.first_batch(batch, samples)

    def prepare_displays(self) -> None:
        """Show that a run is being prepared: no event is fired yet."""
        for display in self.handler.of_kind(ProgressCallback):
            display.prepare()

    def count_samples(self, samples: float) -> None:
        """Hand the displays how many samples this run has trained on, of which they show the speed."""
        for display in self.handler.of_kind(ProgressCallback):
            display.samples = samples

    def write_reports(self) -> None:
        """Write the reports of a run that ends with an exception, which fires no `on_train_end`."""
        for callback in self.handler.of_kind(ReportCallback):
            callback.write(self._plans.args, self.state)

    def end_evaluation_displays(self) -> None:
        """Remove the bars of an evaluation: one that fails, or that a script runs by itself, fires no `on_evaluate`."""
        for display in self.handler.of_kind(ProgressCallback):
            display.end_evaluation()

    def end_run(self) -> None:
        """Release the terminal, and the averages of weights: a run that ends with an exception does not fire
        `on_train_end`, and a state that is then loaded for the next one would be taken for a state of this one.
        """
        for display in self.handler.of_kind(ProgressCallback):
            display.close()
        for average in self.handler.of_kind(SWACallback):
            average.release()
