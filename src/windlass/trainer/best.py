"""The best model of a run: noted at evaluations, loaded at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.metric_values import number_in
from windlass.trainer.resuming import ResumingMixin

logger = get_logger(__name__)


class BestMixin(ResumingMixin):
    """Which evaluation was the best."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the metric if it is the best so far; gives whether it is.

        Raises:
            ConfigError: the evaluation did not return it.
        """
        if self.args.metric_for_best_model is None:
            return False
        value = find_metric(metrics, self.args.metric_for_best_model)
        self._last_metric = self.state.global_step, value
        best = self.state.best_metric
        better = math.isfinite(value) and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        )
        if better:
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step
        return better

    def _is_kept_as_best(self) -> bool:
        """Note the last evaluation if it is among the best `keep_best` so far; gives whether it is."""
        step, value = self._last_metric
        if not self.args.keep_best or value is None or not math.isfinite(value):
            return False
        sign = -1 if self.args.greater_is_better else 1
        # Of equals the earlier one stays; an evaluation that is made again replaces what it gave before.
        others = [noted for noted in self._best_evaluations if noted[1] != step]
        ranked = sorted([*others, [value, step]], key=lambda noted: (sign * noted[0], noted[1]))
        self._best_evaluations = ranked[: self.args.keep_best]
        return [value, step] in self._best_evaluations

    def _load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, verified."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning("load_best_model_at_end: no evaluation gave a best model; the last weights stay")
            return
        checkpoint = self._open_checkpoint(best)
        checkpoint.load_weights(self.model)
        logger.info("loaded the best model, of step %d: %s", checkpoint.step, checkpoint.folder)


def find_metric(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name; its `eval_` prefix is optional.

    Raises:
        ConfigError: it is not among the metrics, which are listed, or it is not a number.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        fix = f"no evaluation returns {key!r}; it returns: {', '.join(sorted(metrics))}"
        raise ConfigError(Problem("metric_for_best_model", name, fix))
    return number_in(metrics, key, "metric_for_best_model", name)
