"""When a run logs, evaluates, saves and ends, as the arguments configure it."""

from __future__ import annotations

from typing import Any

from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the control flags by the strategies of the arguments.

    `state.logging_steps`, `state.eval_steps` and `state.save_steps` are absolute numbers of updates. With a strategy of
    "steps" the last step of a run is always saved, and always evaluated once `eval_delay` has passed.
    """

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> TrainerControl:
        step = state.global_step
        last = step >= state.max_steps
        log, evaluate, save = state.logging_steps, state.eval_steps, state.save_steps
        by_steps = args.logging_strategy == "steps" and log > 0 and step % log == 0
        if by_steps or (step == 1 and args.logging_first_step):
            control.should_log = True
        may_evaluate = args.eval_strategy == "steps" and args.eval_delay <= step
        if may_evaluate and (last or (evaluate > 0 and step % evaluate == 0)):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or (save > 0 and step % save == 0)):
            control.should_save = True
        if last:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: Args, state: TrainerState, control: Control, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control
