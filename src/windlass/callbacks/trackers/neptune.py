"""Neptune."""

from __future__ import annotations

import math
import os
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, split_numbers, warn_of_value
from windlass.core.optional import require

_PURPOSE = "report to Neptune"


@main_only
class NeptuneTracker(PackageTracker):
    """A run of Neptune (`neptune` 1.x). `$NEPTUNE_PROJECT`, `$NEPTUNE_API_TOKEN` and `$NEPTUNE_MODE` ("offline") are
    those of the package.

    Args:
        run_name: name of the project, as OWNER/NAME.
        **kwargs: for `neptune.init_run`.
    """

    name = "neptune"
    closes = "stop"
    project_variable = "NEPTUNE_PROJECT"
    run: Any = None

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._identity: str | None = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """A resumed run is continued, unless it was recorded without a connection."""
        project = os.environ.get(cls.project_variable) or facts.project
        known = {"name": facts.name} if facts.run_id is None else {"with_id": facts.run_id}
        return cls(project, **known)

    @property
    def run_id(self) -> str | None:
        return self._identity

    def start(self) -> None:
        self.run = self.package.init_run(project=self.run_name, **self.init_kwargs)
        errors = require("neptune.exceptions", _PURPOSE)
        try:
            self._identity = str(self.run["sys/id"].fetch())
        except (errors.MissingFieldException, errors.NeptuneOfflineModeFetchException):
            self._identity = None  # a run without a connection has none, and cannot be continued

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run["parameters"] = require("neptune.utils", _PURPOSE).stringify_unsupported(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text, and warn of other values, once each. Neptune stores no number that is not finite: it is
        sent as text, under another name.
        """
        numbers, others = split_numbers(values)
        for name, value in numbers.items():
            if math.isfinite(value):
                self.run[name].append(float(value), step=step, **kwargs)
            else:
                # A series of numbers takes no text, and refuses NaN.
                self.run[f"{name} (not finite)"].append(str(value), step=step, **kwargs)
        for name, value in others.items():
            if isinstance(value, str):
                self.run[name].append(value, step=step, **kwargs)
            else:
                warn_of_value("Neptune", name, value)
