"""`metrics.jsonl`: all metrics of a run, one JSON object per line, always written.

A row has `event` ("log", "evaluate", "predict", "summary", "alert"), `step`, `epoch`, the metrics, and last `timing`:
the values that depend on the clock, the machine or the process (compilations), so that everything else is bitwise
reproducible, except alerts of rules about time;
`wall` is the time of writing, and `elapsed` the seconds since this call of `train()` began.
Floats are read back with the same bits; those that JSON cannot represent are the strings "NaN", "Infinity" and
"-Infinity".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.callbacks.alerts import Alerts
from windlass.callbacks.row_file import RowFile
from windlass.callbacks.rows import Row, RowCallback, revived
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control
from windlass.core.clock import Moment
from windlass.core.errors import DataError
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.plain_text import parse_json

logger = get_logger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsLogCallback(RowCallback):
    """Writes `metrics.jsonl` into the output folder, on the main process only.

    A run that starts at step 0 renames an older file to the next free name, `metrics-1.jsonl` and so on. A resumed run
    truncates the file to the step of its checkpoint, so that the file of an interrupted run equals that of an
    uninterrupted one. A failed write (full disk) is warned of and does not stop training; its row is kept in memory and
    written with the next one that succeeds.

    Args:
        output_dir: the run's folder; created when the first row is written.
        alerts: limits by rule; their alerts are rows too.
        follows_arguments: each run writes into the folder that its arguments name when it begins, if a script assigned
            another one since.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        alerts: Mapping[str, float] | None = None,
        *,
        follows_arguments: bool = False,
    ) -> None:
        super().__init__()
        self._alerts = Alerts(alerts or {})
        self._follows_arguments = follows_arguments
        self._file = RowFile(Path(output_dir).expanduser().absolute() / FILE_NAME)
        self._waiting: list[Row] = []  # not written yet
        self._began: Moment | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._follows_arguments:
            self._file = self._file.of_run(args)
        self._began = Moment()
        self._alerts.saved()
        self._file.begin(state.global_step)

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._alerts.saved()

    def roll_back(self, state: TrainerState) -> None:
        """Remove the rows of steps after `state.global_step`, to which the run rolled back."""
        if not state.is_world_process_zero:
            return
        self._waiting = [row for row in self._waiting if row["step"] <= state.global_step]
        self._file.roll_back(state.global_step)

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._file.end()
        self._began = None

    def take(self, row: Row, args: TrainingArguments, state: TrainerState) -> None:
        if self._file.has(row):
            return
        if self._began is not None:
            row["timing"]["elapsed"] = round(self._began.elapsed(), 4)
        self._waiting.extend([row, *self._alerts.check(row)])
        try:
            while self._waiting:
                self._file.append(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            if len(self._waiting) == 1:
                message = "%s could not be written; training continues: %s. Its rows are kept in memory until it can"
                logger.warning(message, self.path, error)


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a `metrics.jsonl`, with NaN and the infinities as floats.

    An incomplete last line (the process died while writing) is left out. A metric that is the string "NaN" is read as
    the float. Raises DataError for a line that is not a JSON object, naming file and line.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last line break: empty, or torn
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            message = f"{path}, line {number}: not a JSON object ({error.msg}): {line[:80]!r}"
            raise DataError(message) from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not a JSON object: {line[:80]!r}")
        rows.append(revived(row))
    return rows
