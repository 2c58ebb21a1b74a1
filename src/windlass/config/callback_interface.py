"""The base class of callbacks: the sixteen events, with what each receives."""

from __future__ import annotations

from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.core.events import TrainerControl, TrainerState

# Short names, with which the signature of an event is one line.
Args = TrainingArguments
Control = TrainerControl


class TrainerCallback:
    """Inspects a run and decides; never changes the loop itself.

    Every event receives `(args, state, control, **kwargs)`: the arguments of the run, its progress, which is read only,
    and the flags of what it does next. kwargs hold `model`, `optimizer`, `lr_scheduler`, `train_dataloader`,
    `eval_dataloader`, `processing_class`, and `logs` / `metrics` if the event has them. An event may return nothing,
    the control object (mutated or new), or a dict of control flags such as `{"should_training_stop": True}`.

    A callback with state gives it as `state()` -> {"args": {...}, "attributes": {...}}, or as `state_dict` /
    `load_state_dict`; it travels in the checkpoint.

    The events, in the order in which a run fires them::

        on_init_end
        on_train_begin
        for each epoch:
            on_epoch_begin
            for each update:
                on_step_begin
                for each micro-batch but the last: on_substep_end
                on_pre_optimizer_step        after clipping, before the update
                on_optimizer_step            after the update, before gradients are cleared
                on_step_end
                on_log, on_prediction_step..., on_evaluate, on_save     when due, in this order
            on_epoch_end                     then on_log, on_evaluate, on_save when due
        on_log                               the summary
        on_train_end
    """

    def on_init_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """The Trainer is constructed. Callbacks that are added later do not receive it."""

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """Training begins: `model`, optimizer and schedule are built, and a checkpoint, if any, is restored."""

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """Training ended or was stopped; with `load_best_model_at_end` the model has the best weights."""

    def on_epoch_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """A pass over the training data begins."""

    def on_epoch_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """A pass over the training data ended."""

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """An update begins, before its first micro-batch."""

    def on_substep_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """A micro-batch ended that is not the last one of its update."""

    def on_pre_optimizer_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """Gradients are complete and clipped; the weights are not updated yet."""

    def on_optimizer_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """The weights were updated, or the update was skipped as not finite; gradients are not cleared yet."""

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """An update ended; `state.global_step` counts it. Flags that are set here act at once."""

    def on_evaluate(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """An evaluation ended; `metrics` holds its results by name."""

    def on_predict(
        self, args: Args, state: TrainerState, control: Control, metrics: Any, **kwargs: Any
    ) -> Any:
        """`predict` ended; `metrics` holds its results by name."""

    def on_prediction_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """A batch of an evaluation or a prediction was computed."""

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """A checkpoint is committed. `state` is as the checkpoint has it, and may be some updates old."""

    def on_log(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """Values were added to `state.log_history`; `logs` holds them by name."""

    def on_push_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> Any:
        """`push_to_hub` wrote the model, and uploads it next."""
