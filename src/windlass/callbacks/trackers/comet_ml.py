"""Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from windlass.callbacks.tracker import PackageTracker, main_only, split_numbers


@main_only
class CometMLTracker(PackageTracker):
    """An experiment of Comet (version 3.41 or later). The key is read from Comet's own configuration.

    The arguments are those of `PackageTracker`, for `comet_ml.start`; `name` names the experiment.
    """

    name = "comet_ml"
    handle = "writer"
    closes = "end"
    project_variable = "COMET_PROJECT_NAME"
    resumption: ClassVar[Mapping[str, str]] = {"experiment_key": "{}"}  # if there is a connection
    writer: Any = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self.experiment_name = kwargs.pop("name", None)
        super().__init__(run_name, **kwargs)

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
