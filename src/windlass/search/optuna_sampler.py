"""Trials that optuna chooses and prunes. The study is in memory, and filled again from the file of the search."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.core.optional import require
from windlass.search.study import Record, stored_value
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


class _Recalling:
    """A copy of the script's sampler. In a trial of an earlier process it draws as it did there, so that with a seed
    its next values are those of a search that was not interrupted; the trial gets the values that it had, seed or not.

    Attributes:
        values: those of the present trial by name; empty if it is new.
    """

    def __init__(self, sampler: Any) -> None:
        # Not the script's own, which a search before in the same process may have used.
        self._sampler = copy.deepcopy(sampler)
        self.values: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample_relative(self, study: Any, trial: Any, search_space: Mapping[str, Any]) -> dict[str, Any]:
        drawn = self._sampler.sample_relative(study, trial, search_space)
        return {name: self._recalled(name, value, search_space[name]) for name, value in drawn.items()}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        drawn = self._sampler.sample_independent(study, trial, param_name, param_distribution)
        return self._recalled(param_name, drawn, param_distribution)

    def _recalled(self, name: str, drawn: Any, distribution: Any) -> Any:
        """The value of an earlier process; `drawn` if the space no longer has it, so that another space is refused."""
        if name not in self.values:
            return drawn
        known = self.values[name]
        if hasattr(distribution, "choices"):
            return next((one for one in distribution.choices if stored_value(one) == known), drawn)
        is_inside = isinstance(known, int | float) and distribution.low <= known <= distribution.high
        return known if is_inside else drawn


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
        self._recalling = _Recalling(options["sampler"]) if options.get("sampler") is not None else None
        sampler = self._recalling or self._optuna.samplers.TPESampler(seed=seed)
        # A pruner may choose by the name of the study, which optuna draws.
        options = {"study_name": "search", **options, "sampler": sampler}
        # The word of the other backends, which recipes can write; optuna takes objects.
        if options.get("pruner") == "median":
            options["pruner"] = self._optuna.pruners.MedianPruner()
        with _without_remarks(self._optuna.logging):
            self._study = self._optuna.create_study(directions=list(directions), **options)
        # Samplers of a finite space call it after its last value, which optuna allows in its own loop alone.
        self._is_over = False
        self._study.stop = self._stop
        self._has_one_objective = len(directions) == 1
        self._reported: set[int] = set()  # updates of the present trial, of which optuna takes each once

    def ask(self, number: int, fixed: dict[str, Any] | None) -> Any:
        if self._is_over:
            return None
        self._reported.clear()
        if self._recalling is not None:
            self._recalling.values = fixed or {}
        return self._study.ask()

    def _stop(self) -> None:
        self._is_over = True

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
        return self._take(trial, reports, step)

    def _take(self, trial: Any, reports: Mapping[int, float], last: int) -> bool:
        """Tell the study of reports up to update `last`; return what the pruner says after the last of them. It is
        asked after each: one may note what it compares later trials with.
        """
        is_pruned = False
        for step, value in reports.items():
            if self._has_one_objective and step <= last and step not in self._reported:
                self._reported.add(step)
                trial.report(value, step)
                is_pruned = bool(trial.should_prune())
        return is_pruned
