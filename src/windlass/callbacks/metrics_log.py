"""`metrics.jsonl`: everything a run measured, one JSON object per line, always written.

A row holds `event` ("log", "evaluate", "predict", "summary"), `step`, `epoch`, the metrics, and last
`timing`: whatever depends on the clock or the machine, so that all the rest repeats to the bit. Floats are
written so that they read back as the same bits; those that JSON has no word for are the strings "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.callbacks.rows import Row, RowCallback, repeatable, revived
from windlass.core.errors import DataError
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.logs import get_logger
from windlass.core.output_folder import OutputFolder
from windlass.core.plain_text import parse_json

logger = get_logger(__name__)

FILE_NAME = "metrics.jsonl"
_MAX_LINE = 1 << 24


class MetricsLogCallback(RowCallback):
    """Writes `metrics.jsonl` into the output folder, on the main process only.

    A run that starts at step 0 never mixes with an earlier one: an older file is kept under the next free
    name, `metrics-1.jsonl` and so on. A resumed run cuts the file back to what its checkpoint knew, so that
    the file of an interrupted run ends as that of an uninterrupted one. A failed write (full disk) is warned
    of and does not stop training; its row is kept in memory and written when that works again.

    Args:
        output_dir: the run's folder; made when the first row is written.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(output_dir).expanduser().absolute() / FILE_NAME
        self._folder: OutputFolder | None = None
        self._waiting: list[Row] = []  # that could not be written yet
        self._tail_checked = False
        self._rows_before_training = False  # of this run: an evaluation that preceded `train()`
        self._kept_at_cut: list[Row] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if state.global_step > 0:
            self._kept_at_cut = self._cut_back(state.global_step)
        elif not self._rows_before_training:
            _set_aside(self.path)
        self._rows_before_training = False
        self._tail_checked = True

    def roll_back(self, state: TrainerState) -> None:
        """Forget what was logged behind the step that a run went back to."""
        if not state.is_world_process_zero:
            return
        self._waiting = [row for row in self._waiting if row["step"] <= state.global_step]
        try:
            self._kept_at_cut = self._cut_back(state.global_step)
        except OSError as error:
            logger.warning("%s still has the rows that were rolled back: %s", self.path, error)

    def _cut_back(self, step: int) -> list[Row]:
        try:
            return _cut_back(self.path, step)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged and cannot be continued", self.path)
            _set_aside(self.path)
            return []

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._kept_at_cut = []

    def take(self, row: Row, args: Any, state: TrainerState) -> None:
        if repeatable(row) in self._kept_at_cut:  # a resumed run says again what the file already holds
            self._kept_at_cut.remove(repeatable(row))
            return
        self._waiting.append(row)
        try:
            if not self._tail_checked:
                self._start_outside_training()
            self._write_waiting()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning(
                    "%s could not be written, and training goes on: %s. Its rows are kept in memory until it can",
                    self.path, error,
                )  # fmt: skip

    def _write_waiting(self) -> None:
        self._folder = self._folder or OutputFolder(self.path.parent)
        self._folder.check()
        while self._waiting:
            _append(self.path, self._waiting[0])
            del self._waiting[0]

    def _start_outside_training(self) -> None:
        self._rows_before_training = not self.path.exists()
        _drop_torn_line(self.path)
        self._tail_checked = True


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a `metrics.jsonl`, with NaN and the infinities as floats again.

    A last line that was cut short (the process died while writing) is left out. A metric that is itself the
    string "NaN" comes back as the float.

    Raises:
        DataError: a line that is not a JSON object, naming file and line.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is empty, or torn
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not a JSON object ({error.msg}): {line[:80]!r}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not a JSON object: {line[:80]!r}")
        rows.append(revived(row))
    return rows


# --- the file -----------------------------------------------------------------------------------------------


def _append(path: Path, row: Row) -> None:
    """One whole line or nothing: a write that fails half way is taken back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a plain file")  # opening a pipe would wait for a reader
    line = json.dumps(row, allow_nan=False) + "\n"
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line.encode())
            if written != len(line.encode()):
                raise OSError(f"only {written} bytes of the line were written")
        except OSError:
            file.truncate(end)
            raise


def _drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    size = path.stat().st_size
    whole = _end_of_lines(path)
    if whole != size:
        logger.warning("%s ends in an unfinished line, which is dropped", path)
        os.truncate(path, whole)


def _end_of_lines(path: Path) -> int:
    """Where the last whole line ends; looked for from the end, for such a file may be long."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _MAX_LINE, 0)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _set_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (older := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, older)
    logger.warning("%s held the metrics of an earlier run; they are now in %s", path, older.name)


def _cut_back(path: Path, step: int) -> list[Row]:
    """Keep the rows up to `step`, replacing the file in one move; summaries go, for the run they closed goes
    on.

    Returns:
        The kept rows of `step` itself, without timing: a resumed run may produce them once more.
    """
    if not path.exists():
        return []
    last: list[Row] = []
    partial = path.with_name(path.name + ".tmp")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:
        for line in _whole_lines(path):
            row = parse_json(line)
            if row["step"] <= step and row["event"] != "summary":
                file.write(line)
            if row["step"] == step and row["event"] != "summary":
                last.append(repeatable(row))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return last


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines that have their ends.

    Raises:
        ValueError: it is no plain file, or a line is too long for one of ours.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a plain file")
    with open(path, "rb") as file:
        while line := file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE:
                raise ValueError(f"{path} has a line of {_MAX_LINE:,} bytes or more")
            if line.endswith(b"\n"):
                yield line
