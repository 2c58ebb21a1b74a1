"""ClearML."""

from __future__ import annotations

import math
import os
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, numbers_alone
from windlass.core.errors import ConfigError, Problem

_SPLITS = ("eval", "test", "train")
_OFFLINE = "offline-"


@main_only
class ClearMLTracker(PackageTracker):
    """A task of ClearML; one that the script has opened already is used as it is, and left open.

    Args:
        run_name: project and task name, unless `$CLEARML_PROJECT` and `$CLEARML_TASK` are set.
        **kwargs: for `clearml.Task.init`.
    """

    name = "clearml"
    handle = "task"
    closes = "close"
    task: Any = None

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """A resumed run continues its task, unless that was recorded offline."""
        task = {"task_name": os.environ.get("CLEARML_TASK") or facts.name or facts.folder.name}
        resumable = facts.run_id is not None and not facts.run_id.startswith(_OFFLINE)
        identity = {"continue_last_task": facts.run_id} if resumable else {}
        return cls(facts.project, **task, **identity)

    def start(self) -> None:
        self.task = self.package.Task.current_task()
        self.is_ours = self.task is None
        if self.is_ours:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.run_name),
            }
            self.task = self.package.Task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers: `eval_loss` is the curve `eval` in the chart `loss`; without a step, single values.

        ClearML draws non-finite values as 0, so they are written to its console instead.
        """
        reporter = self.task.get_logger()
        for name, value in numbers_alone("ClearML", values).items():
            if not math.isfinite(value):
                reporter.report_text(f"{name} is {value}" + ("" if step is None else f" at step {step}"))
            elif step is None:
                reporter.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart_and_curve(name)
                reporter.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values`, images by name (arrays or PIL images), at update `step`."""
        for name, image in values.items():
            title, series = _chart_and_curve(name)
            self.task.get_logger().report_image(
                title=title, series=series, iteration=step, image=image, **kwargs
            )

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, `table_name`, at update `step`: a `dataframe`, or rows in `data`, of which without `columns` the
        first one holds the headings. Raises ConfigError if neither is given.
        """
        if dataframe is None and data is None:
            raise ConfigError(Problem("data", None, "give either data or dataframe"))
        rows = [columns, *data] if columns and data is not None else data
        title, series = _chart_and_curve(table_name)
        table = rows if dataframe is None else dataframe
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )


def _chart_and_curve(name: str) -> tuple[str, str]:
    """`eval_loss` -> ("loss", "eval"); a name without the prefix of a split is a curve of that name."""
    split, _, rest = name.partition("_")
    return (rest, split) if split in _SPLITS and rest else (name, name)
