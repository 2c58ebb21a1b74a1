"""The best evaluations of a run, and their checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.config.plan import SavePlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.metric_values import number_in
from windlass.core.types import State
from windlass.trainer.run_events import Events

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint, with metric and step of its evaluation."""

    checkpoint: str | None = None
    metric: float | None = None
    step: int | None = None


class BestTracker:
    """Ranks evaluations by the metric of the plan, and records the checkpoints of the best ones.

    The only writer of `best_metric`, `best_global_step` and `best_model_checkpoint` of the state. `folder_of` returns
    the checkpoint folder of a step.
    """

    def __init__(self, plan: SavePlan, events: Events, folder_of: Callable[[int], Path]) -> None:
        self._plan, self._events, self._folder_of = plan, events, folder_of
        # The best `keep_best` evaluations, as [metric, step], best first, now and at the last committed checkpoint.
        self.evaluations: list[list[float]] = []
        self._committed_evaluations: list[list[float]] = []
        # Step and metric of the last evaluation.
        self._last: tuple[int, float | None] = (-1, None)
        self._saved = Best()
        # Step of the last save that was begun and did not fail, or of the checkpoint that the run continues from.
        self._saved_step = -1

    # --- evaluations ------------------------------------------------------------------------------------------------

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation at the present step; return True if it is the best so far."""
        if self._plan.metric is None:
            return False
        value, state = find_metric(metrics, self._plan.metric), self._events.state
        self._last = state.global_step, value
        best = state.best_metric
        # As the first value NaN would stay the best, because no comparison with it is true, and so would an infinity.
        better = math.isfinite(value) and (
            best is None or (value > best if self._plan.greater_is_better else value < best)
        )
        if better:
            state.best_metric, state.best_global_step = value, state.global_step
            self._find_saved()  # an epoch's last update may be saved before the epoch is evaluated
        return better

    def keeps_last(self) -> bool:
        """Rank the last evaluation; return True if it is among the best `keep_best`."""
        step, value = self._last
        if not self._plan.keep_best or value is None or not math.isfinite(value):
            return False
        sign = -1 if self._plan.greater_is_better else 1
        # Of equal metrics the earlier one is kept; a repeated evaluation replaces its first result.
        others = [known for known in self.evaluations if known[1] != step]
        ranked = sorted([*others, [value, step]], key=lambda known: (sign * known[0], known[1]))
        self.evaluations = ranked[: self._plan.keep_best]
        return [value, step] in self.evaluations

    def metric_at(self, step: int) -> float | None:
        """The metric of the last evaluation, if that was at this step."""
        last_step, value = self._last
        return None if last_step != step or value is None else float(value)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def begin_save(self) -> Best:
        """Called before a checkpoint of the present step is saved. Return the best checkpoint so far, for `failed`."""
        previous, self._saved_step = self._saved, self._events.state.global_step
        self._find_saved()
        return previous

    def _find_saved(self) -> None:
        """The best evaluation is that of the saved step: so is the best checkpoint."""
        state = self._events.state
        if state.best_global_step == self._saved_step:
            self._note(Best(str(self._folder_of(self._saved_step)), state.best_metric, self._saved_step))

    def _note(self, best: Best) -> None:
        self._saved, self._events.state.best_model_checkpoint = best, best.checkpoint

    def committed(self) -> None:
        """Called once a checkpoint is committed."""
        self._committed_evaluations = list(self.evaluations)

    def failed(self, step: int, previous: Best) -> None:
        """Called once the checkpoint of this step failed: the best is one of those that exist."""
        state = self._events.state
        self._saved_step = -1
        if self._saved.step == step:
            self._note(previous)
        # Its weights exist nowhere. A later evaluation need only be better than those that do.
        if self._plan.load_best_at_end and state.best_global_step == step:
            state.best_metric, state.best_global_step = self._saved.metric, self._saved.step
        self.evaluations = list(self._committed_evaluations)

    def checkpoints(self) -> list[Path]:
        """The folders of the best model and of the best evaluations, as far as they were saved."""
        best = self._events.state.best_model_checkpoint
        kept = [self._folder_of(int(step)) for _, step in self.evaluations]
        return kept if best is None else [*kept, Path(best)]

    # --- in checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {"evaluations": self.evaluations, **self._rule}

    def load_state_dict(self, state: State) -> None:
        saved = {name: state.get(name) for name in self._rule}
        # Earlier versions did not save the rule; a run without a metric ranks nothing, and keeps what was found.
        if None not in (self._plan.metric, saved["metric"]) and saved != self._rule:
            self._forget(saved)
            return
        self.evaluations = state["evaluations"]
        self._committed_evaluations = list(self.evaluations)

    @property
    def _rule(self) -> dict[str, Any]:
        """By what evaluations are ranked; the prefix of the name is optional."""
        metric = self._plan.metric
        return {
            "metric": None if metric is None else metric.removeprefix("eval_"),
            "greater_is_better": self._plan.greater_is_better,
        }

    def _forget(self, saved: Mapping[str, Any]) -> None:
        """Begin the ranking again: the best by another rule is not the best by this one."""
        logger.warning(
            "the evaluations of the checkpoint were ranked by %s, and this run ranks by %s: the best so far is not "
            "taken over",
            saved,
            self._rule,
        )
        state = self._events.state
        self._last = (-1, None)
        self.evaluations, self._committed_evaluations = [], []
        state.best_metric = state.best_global_step = None
        self._note(Best())

    def moved(self, folder: Path) -> None:
        """Set the folder of the best checkpoint."""
        self._note(replace(self._saved, checkpoint=str(folder)))

    def resume(self, step: int, metric: Any) -> None:
        """Continue at a checkpoint whose step was evaluated with this metric (None: it was not)."""
        state = self._events.state
        self._last, self._saved_step = (step, metric), step
        best = state.best_model_checkpoint
        self._saved = Best() if best is None else Best(best, state.best_metric, state.best_global_step)


def find_metric(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name; its `eval_` prefix is optional. Raises ConfigError if it is not among the metrics, which
    are listed, or it is not a number.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        fix = f"no evaluation returns {key!r}; it returns: {', '.join(sorted(metrics))}"
        raise ConfigError(Problem("metric_for_best_model", name, fix))
    return number_in(metrics, key, name)
