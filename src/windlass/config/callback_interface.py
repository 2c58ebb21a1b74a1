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

    Every event receives `(args, state, control, **kwargs)`; kwargs hold `model`, `optimizer`, `lr_scheduler`,
    `train_dataloader`, `eval_dataloader`, `processing_class`, and `logs` / `metrics` where the event has them. An
    event may return nothing, the control object (mutated or new), or a dict of control flags such as
    `{"should_training_stop": True}`.

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

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **kwargs: Any,
    ) -> Any: ...

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...
