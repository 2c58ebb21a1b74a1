"""Stop training when a metric no longer improves."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from windlass.callbacks.rows import Logs
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.events import ExportableState, TrainerControl, TrainerState
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.metric_values import number_in
from windlass.core.output import say

logger = get_job_logger(__name__)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after `early_stopping_patience` evaluations in a row without improvement.

    An evaluation improves if `metric_for_best_model` is better than `state.best_metric`, the best of the evaluations
    before it, by more than the threshold. `greater_is_better` sets the direction. The first finite metric is an
    improvement; NaN and the infinities never are.

    Args:
        early_stopping_patience: evaluations without improvement, at least 1.
        early_stopping_threshold: the least improvement that counts, in units of the metric, at least 0.

    Raises:
        ConfigError: a patience or threshold out of range; at the start of training, no metric to watch or no
            evaluation.
    """

    follows_run_only = True  # evaluations that other callbacks make do not count

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0
    ) -> None:
        patience: object = early_stopping_patience
        # NaN too, with which a run would never stop
        if not (isinstance(patience, Real) and early_stopping_patience >= 1):
            fix = "give the number of evaluations, 1 or more"
            raise ConfigError(Problem("early_stopping_patience", early_stopping_patience, fix))
        threshold = early_stopping_threshold or 0.0
        given: object = threshold
        if not (isinstance(given, Real) and threshold >= 0.0):
            raise ConfigError(Problem("early_stopping_threshold", threshold, "give 0 or a positive number"))
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = threshold
        self.early_stopping_patience_counter = 0

    @property
    def has_stopped(self) -> bool:
        """Return True if the run ends, because its last evaluations were no improvement."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        problems = []
        if args.metric_for_best_model is None:
            fix = "EarlyStoppingCallback requires metric_for_best_model to be defined; set it, for example to 'loss'"
            problems.append(Problem("metric_for_best_model", None, fix))
        if args.eval_strategy == "no":
            fix = "EarlyStoppingCallback requires an evaluation strategy of 'steps' or 'epoch'"
            problems.append(Problem("eval_strategy", str(getattr(args.eval_strategy, "value", "no")), fix))
        refuse(problems)
        if not state.global_step:
            # Of an earlier run of this object: its count must not be in checkpoints before this run's first evaluation.
            self.early_stopping_patience_counter = 0
        elif self.has_stopped:
            # Restored from a checkpoint saved after the decision, of a run that was interrupted before it could end.
            logger.warning(
                "EarlyStoppingCallback has stopped this run already (%d evaluations without improvement). To continue, "
                "increase early_stopping_patience.",
                self.early_stopping_patience_counter,
            )
            control.should_training_stop = True
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the model after training is the last one, "
                "not the best one."
            )

    def on_evaluate(
        self, args: Args, state: TrainerState, control: Control, metrics: Logs = None, **kwargs: Any
    ) -> None:
        metric = str(args.metric_for_best_model)  # None is refused when training begins
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        if not metrics or name not in metrics:
            # Not an error: with several named evaluation sets only one of them has the metric.
            warn_once(logger, f"EarlyStoppingCallback: an evaluation without {name} is ignored.")
            return
        value = number_in(metrics, name, metric)
        self.check_metric_value(args, state, control, value)
        count = self.early_stopping_patience_counter
        if self.has_stopped:
            if state.is_world_process_zero and not control.should_training_stop:
                evaluations = "1 evaluation" if count == 1 else f"{count} evaluations"
                where = f"{state.global_step} of {state.max_steps}"
                say(f"stopped at {where}: {name} has not improved for {evaluations}")
            control.should_training_stop = True

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Reset the counter after an improvement, else increment it.

        Args:
            args: `greater_is_better` is read.
            state: `best_metric` is read, the best before this evaluation; None: no evaluation had a finite metric.
            control: not read.
            metric_value: the metric of this evaluation.
        """
        best = state.best_metric
        gain = 0.0 if best is None else metric_value - best if args.greater_is_better else best - metric_value
        improves = best is None or (gain > 0.0 and gain > self.early_stopping_threshold)
        # `best_metric` is never set to NaN or an infinity: without this, a run that only has such metrics never stops.
        if improves and math.isfinite(metric_value):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def state(self) -> dict[str, Any]:
        """Return the constructor's arguments and the counter, for a resumed run."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
