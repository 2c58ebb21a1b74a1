"""Comet."""

from __future__ import annotations

import os
from typing import Any, Self

from windlass.callbacks.tracker import GeneralTracker, RunFacts, on_main_process, split_numbers
from windlass.core.optional import require


class CometMLTracker(GeneralTracker):
    """An experiment of Comet (version 3.41 or later). The key is read from Comet's own configuration.

    Args:
        run_name: the *project*, as scripts know this argument.
        **kwargs: for `comet_ml.start`; `name` names the experiment.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.experiment_name = kwargs.pop("name", None)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In project `$COMET_PROJECT_NAME`, or the one that the arguments name; a resumed run continues its own
        experiment where there is a connection.
        """
        project = os.environ.get("COMET_PROJECT_NAME") or facts.project
        identity = {} if facts.run_id is None else {"experiment_key": facts.run_id}
        return cls(project, name=facts.name, **identity)

    @property
    def run_id(self) -> str | None:
        return None if self.writer is None else str(self.writer.get_key())

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        comet_ml = require("comet_ml", "report to Comet")
        self.writer = comet_ml.start(project_name=self.run_name, **self.init_kwargs)
        if self.experiment_name is not None:
            self.writer.set_name(self.experiment_name)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and dicts of numbers as metrics, the rest as text."""
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

    @on_main_process
    def finish(self) -> None:
        self.writer.end()
