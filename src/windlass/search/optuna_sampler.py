"""Trials that optuna chooses and prunes. The study is in memory, and filled again from the file of the search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.core.optional import require
from windlass.search.study import Record
from windlass.search.trial_samplers import Sampler


@contextlib.contextmanager
def _without_remarks(logging: Any) -> Iterator[None]:
    """Within the body, optuna does not tell of its studies: that of a search is the file in its folder."""
    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


class OptunaSampler(Sampler):
    """A study of optuna.

    Args:
        directions: "minimize" or "maximize" for each objective.
        options: arguments of `optuna.create_study`: `sampler`, `pruner` (or "median") and `study_name`. By default its
            sampler has the seed of the run.
        seed: of the default sampler.
    """

    def __init__(self, directions: Sequence[str], options: dict[str, Any], seed: int) -> None:
        self._optuna = require("optuna", "search with backend='optuna'")
        # The default sampler has a seed and chooses the same values again; one of a script's own may not.
        self._repeats = "sampler" not in options
        options = {"sampler": self._optuna.samplers.TPESampler(seed=seed), **options}
        # The word of the other backends, which recipes can write; optuna takes objects.
        if options.get("pruner") == "median":
            options["pruner"] = self._optuna.pruners.MedianPruner()
        with _without_remarks(self._optuna.logging):
            self._study = self._optuna.create_study(directions=list(directions), **options)
        self._has_one_objective = len(directions) == 1
        self._reported: set[int] = set()  # updates of the present trial, of which optuna takes each once

    def ask(self, number: int, fixed: dict[str, Any] | None) -> Any:
        self._reported.clear()
        if fixed is not None and not self._repeats:
            self._study.enqueue_trial(fixed)
        return self._study.ask()

    def tell(self, trial: Any, record: Record) -> None:
        # A pruned trial has no values; its reports are known to the study.
        if record.state == "complete":
            self._study.tell(trial, record.values)
        else:
            states = self._optuna.trial.TrialState
            self._study.tell(trial, state=states.PRUNED if record.state == "pruned" else states.FAIL)

    def replay(self, trial: Any, record: Record) -> None:
        if record.reports:
            self._take(trial, record.reports, max(record.reports))
        self.tell(trial, record)

    def report(self, trial: Any, reports: Mapping[int, float], step: int) -> bool:
        self._take(trial, reports, step)
        return self._has_one_objective and bool(trial.should_prune())

    def _take(self, trial: Any, reports: Mapping[int, float], last: int) -> None:
        """Tell the study of reports up to update `last`: pruners compare the best value of a trial so far."""
        for step, value in reports.items():
            if self._has_one_objective and step <= last and step not in self._reported:
                self._reported.add(step)
                trial.report(value, step)
