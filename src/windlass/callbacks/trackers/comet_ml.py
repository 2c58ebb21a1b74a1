"""Comet."""

from __future__ import annotations

import os
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, split_numbers


@main_only
class CometMLTracker(PackageTracker):
    """An experiment of Comet (version 3.41 or later). The key is read from Comet's own configuration.

    The arguments are those of `PackageTracker`, for `comet_ml.start`; `name` names the experiment.
    """

    name = "comet_ml"
    handle = "writer"
    closes = "end"
    writer: Any = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self.experiment_name = kwargs.pop("name", None)
        super().__init__(run_name, **kwargs)

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In project `$COMET_PROJECT_NAME`, or that of the arguments; a resumed run continues its experiment if
        there is a connection.
        """
        project = os.environ.get("COMET_PROJECT_NAME") or facts.project
        identity = {} if facts.run_id is None else {"experiment_key": facts.run_id}
        return cls(project, name=facts.name, **identity)

    @property
    def run_id(self) -> str | None:
        return None if self.writer is None else str(self.writer.get_key())

    def start(self) -> None:
        self.writer = self.package.start(project_name=self.run_name, **self.init_kwargs)
        if self.experiment_name is not None:
            self.writer.set_name(self.experiment_name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and dicts of numbers as metrics, the rest as text."""
        # Also the experiment's own counter, by which what scripts and its automatic logging send is drawn.
        if step is not None:
            self.writer.set_step(step)
        numbers, others = split_numbers(values)
        for name, value in numbers.items():
            self.writer.log_metric(name, value, step=step, **kwargs)
        for name, value in others.items():
            if isinstance(value, dict) and not split_numbers(value)[1]:
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self.writer.log_other(name, value, **kwargs)
