"""Stop when the watched metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.logs import get_logger
from windlass.core.metric_values import number_in

logger = get_logger(__name__)


class EarlyStoppingCallback(TrainerCallback):
    """Stops training after `early_stopping_patience` evaluations in a row without improvement.

    An evaluation improves when `metric_for_best_model` is better than `state.best_metric` (the best of the
    evaluations before it) by more than the threshold. Better means greater or less as `greater_is_better`
    says.

    Args:
        early_stopping_patience: evaluations without improvement that are allowed, at least 1.
        early_stopping_threshold: the least improvement that counts, in units of the metric, at least 0.

    Raises:
        ConfigError: a patience or threshold out of range; at the start of training, no metric to watch or no
            evaluation.
    """

    follows_run_only = True  # evaluations that other callbacks make do not count

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0
    ) -> None:
        if early_stopping_patience < 1:
            raise ConfigError(
                Problem(
                    "early_stopping_patience",
                    early_stopping_patience,
                    "give the number of evaluations, 1 or more",
                )
            )
        threshold = early_stopping_threshold or 0.0
        if not threshold >= 0.0:
            raise ConfigError(Problem("early_stopping_threshold", threshold, "give 0 or a positive number"))
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        problems = []
        if args.metric_for_best_model is None:
            fix = (
                "EarlyStoppingCallback requires metric_for_best_model to be defined; give one, such as 'loss'"
            )
            problems.append(Problem("metric_for_best_model", None, fix))
        if args.eval_strategy == "no":
            fix = "EarlyStoppingCallback requires an evaluation strategy of 'steps' or 'epoch'"
            problems.append(Problem("eval_strategy", str(getattr(args.eval_strategy, "value", "no")), fix))
        if problems:
            raise ConfigError(problems)
        if state.global_step and self.early_stopping_patience_counter >= self.early_stopping_patience:
            # Restored from a checkpoint that was saved after the decision: the run was cut off before it could end.
            logger.warning(
                "EarlyStoppingCallback had stopped this run already (%d evaluations without improvement). To train "
                "on, give it more patience.",
                self.early_stopping_patience_counter,
            )
            control.should_training_stop = True
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: when training stops, the model is "
                "the last one, not the best one."
            )

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model
        if not name.startswith("eval_"):
            name = f"eval_{name}"
        if not metrics or name not in metrics:
            # With several named evaluation sets only one of them has the metric, so this is no error.
            logger.warning(
                "EarlyStoppingCallback: this evaluation has no %s, so it does not count for early stopping.",
                name,
            )
            return
        value = number_in(metrics, name, "metric_for_best_model", args.metric_for_best_model)
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(
        self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Count this evaluation for or against the run. A NaN never counts as an improvement on a number."""
        best = state.best_metric
        if best is None or self._improves(metric_value, best, bool(args.greater_is_better)):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def _improves(self, value: float, best: float, greater: bool) -> bool:
        gain = value - best if greater else best - value
        return gain > 0.0 and gain > self.early_stopping_threshold

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: the constructor's arguments, and the count so far."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
