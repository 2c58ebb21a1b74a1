"""What chooses the values of trials without another package: random search, and a grid."""

from __future__ import annotations

import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.search.space import Distribution, Trial
from windlass.search.study import Record, Study


class MedianRule:
    """Prunes a trial that is worse at an update than the median of the complete trials there."""

    def __init__(self, study: Study, first: int = 4) -> None:
        self._study, self._first = study, first

    def prunes(self, value: float, step: int) -> bool:
        others = [
            record.reports[step]
            for record in self._study.trials
            if record.state == "complete" and step in record.reports
        ]
        return len(others) >= self._first and self._study.improves(statistics.median(others), value)


class Sampler(ABC):
    """Chooses the values of each trial of a study, one trial after the other."""

    rule: MedianRule | None = None  # which trials end early

    @abstractmethod
    def ask(self, number: int, fixed: dict[str, Any] | None) -> Any:
        """Return the next trial, with `suggest_...` methods; None if there are no further values.

        Args:
            fixed: the values of a trial that an earlier process chose; the trial suggests these.
        """

    def tell(self, trial: Any, record: Record) -> None:
        """Called when a trial has ended."""
        return

    def replay(self, trial: Any, record: Record) -> None:
        """Called with a trial that an earlier process ended, after its values were suggested again."""
        return

    def report(self, trial: Any, reports: Mapping[int, float], step: int) -> bool:
        """Take the objective of the evaluation after update `step`; return True if the trial should end.

        Args:
            reports: update -> objective, of all evaluations of the trial; those of an earlier process are among them.
        """
        return self.rule is not None and self.rule.prunes(reports[step], step)


class RandomSampler(Sampler):
    """Draws each value by itself. What is drawn follows from the seed, the trial and the name of the value."""

    def __init__(self, seed: int, rule: MedianRule | None) -> None:
        self._seed, self.rule = seed, rule

    def ask(self, number: int, fixed: dict[str, Any] | None) -> Trial:
        def choose(name: str, distribution: Distribution) -> Any:
            # By the name too: a space may suggest its values in another order, or some of them only.
            return distribution.sample(random.Random(f"{self._seed}, {number}, {name}"))

        return Trial(number, choose)


class GridSampler(Sampler):
    """Goes through all combinations, the value that is suggested last changing first."""

    def __init__(self, rule: MedianRule | None) -> None:
        self.rule = rule
        # Of the trial before: index and number of points of each value
        self._path: list[tuple[int, int]] = []
        self._began = False

    def ask(self, number: int, fixed: dict[str, Any] | None) -> Trial | None:
        while self._path and self._path[-1][0] + 1 >= self._path[-1][1]:
            self._path.pop()
        if self._began and not self._path:
            return None
        self._began = True
        prefix = [index for index, _ in self._path]
        if prefix:
            prefix[-1] += 1
        path = self._path = []

        def choose(name: str, distribution: Distribution) -> Any:
            points = distribution.points()
            if not points:
                fix = "has no step: a grid needs one, or suggest_categorical"
                raise ConfigError(Problem(f"hp_space.{name}", distribution, fix))
            index = prefix[len(path)] if len(path) < len(prefix) else 0
            path.append((index, len(points)))
            return points[index]

        return Trial(number, choose)
