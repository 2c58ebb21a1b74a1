"""`metrics.jsonl`: all metrics of a run, one JSON object per line, always written.

A row has `event` ("log", "evaluate", "predict", "summary", "alert"), `step`, `epoch`, the metrics, and last `timing`:
the values that depend on the clock, the machine or the process (compilations), so that everything else is bitwise
reproducible, except alerts of rules about time;
`wall` is the time of writing, and `elapsed` the seconds since this call of `train()` began.
Floats are read back with the same bits; those that JSON cannot represent are the strings "NaN", "Infinity" and
"-Infinity".
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windlass.callbacks.alerts import Alerts
from windlass.callbacks.row_file import RowFile
from windlass.callbacks.rows import Row, RowCallback, revived
from windlass.checkpoint.names import shorten
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control
from windlass.core.errors import DataError
from windlass.core.events import TrainerState
from windlass.core.locations import at_home
from windlass.core.logs import get_logger
from windlass.core.run_clock import LATEST, Moment
from windlass.core.whole_file import parse_json

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
        self._file = RowFile(at_home(output_dir).absolute() / FILE_NAME)
        self._waiting: list[Row] = []  # not written yet
        self._began: Moment | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._write_waiting()  # of an earlier run of this object, into its own file
        self._drop_waiting(state)
        if self._follows_arguments:
            self._file = self._file.of_run(args)
        self._began = Moment()
        self._alerts.saved()
        self._file.begin(state.global_step)
        self._warn_of_lost_rows(state)
        self._alerts.begin(partial(self._reported, state.global_step))

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._alerts.saved()

    def roll_back(self, state: TrainerState) -> None:
        """Remove the rows of steps after `state.global_step`, to which the run rolled back."""
        if not state.is_world_process_zero:
            return
        self._drop_waiting(state)
        self._file.roll_back(state.global_step)
        self._alerts.begin(partial(self._reported, state.global_step))

    def _warn_of_lost_rows(self, state: TrainerState) -> None:
        """Name the steps that a resumed run has logged, and of which the file has no row."""
        written = {row["step"] for row in self._reported(state.global_step)} if state.global_step else set()
        # A script may have added any rows to the history.
        logged = [row.get("step") for row in state.log_history if state.global_step]
        lost = sorted({step for step in logged if type(step) is int} - written)
        if lost:
            message = (
                "%s lacks the rows of steps that this run has logged (%s): they were removed, or lost with a disk, or "
                "the run began in another folder. log_history of the checkpoint has their metrics"
            )
            logger.warning(message, self.path, shorten(map(str, lost)))

    def _reported(self, step: int) -> list[Row]:
        """The rows of this run up to `step`; the file may still have later ones, if it could not be changed."""
        rows = whole_rows(self.path)[0] if step else []
        return [row for row in [*rows, *self._waiting] if row["step"] <= step]

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._write_waiting()
        if self._waiting:
            steps = shorten(map(str, sorted({row["step"] for row in self._waiting})))
            message = (
                "%s lacks the rows of steps that could not be written (%s); log_history has their metrics"
            )
            logger.warning(message, self.path, steps)
        self._file.end()
        self._began = None

    def take(self, row: Row, args: TrainingArguments, state: TrainerState) -> None:
        if self._file.has(row):
            return
        if self._began is not None:
            row["timing"]["elapsed"] = round(self._began.elapsed(), 4)
        self._waiting.extend([row, *self._alerts.check(row)])
        self._write_waiting()

    def _drop_waiting(self, state: TrainerState) -> None:
        """Drop the rows of steps after `state.global_step`, which the run makes again."""
        self._waiting = [row for row in self._waiting if row["step"] <= state.global_step]

    def _write_waiting(self) -> None:
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
    *lines, _ = Path(path).read_bytes().split(b"\n")  # after the last line break: empty, or torn
    rows = []
    for number, line in enumerate(lines, start=1):
        row, problem = _parsed_line(line)
        if row is None:
            raise DataError(f"{path}, line {number}: {problem}")
        rows.append(row)
    return rows


# Of the last line of a file: the run writes it now, or was killed while it did.
UNFINISHED = "an unfinished line"
_TOGETHER = 500  # lines that are parsed in one call
_SEAL = 512  # bytes before a position, by which a file is recognised


def whole_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the whole rows, and for each other line which it is and what is wrong with it."""
    found = RowTail(path).read()
    return found.rows, found.damage


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run; none if it has logged nothing. Raises DataError for a damaged row."""
    path = folder / FILE_NAME
    rows, damage = whole_rows(path)
    if serious := [problem for problem in damage if not problem.endswith(UNFINISHED)]:
        raise DataError(f"{path}, {serious[0]}")
    return rows


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a file has since the last look."""

    rows: list[Row]  # the whole ones
    damage: list[str]  # of all looks
    continues: bool  # False if the file is another one, or was cut back: `rows` are all that it has


class RowTail:
    """Reads each row of a file that grows once.

    Args:
        path: may be made later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset, self._lines, self._seal = 0, 0, 0, 0
        self._damage: list[str] = []

    @property
    def position(self) -> str:
        """Where it is: the file, and how much of it was read."""
        return f"{self._inode:x}-{self._offset:x}-{self._seal:x}"

    def read(self) -> NewRows:
        """Return the whole rows since the last call. Raises OSError if the file cannot be read."""
        if not self._path.is_file():
            continues = self._offset == 0
            self._forget()
            return NewRows([], [], continues)
        with open(self._path, "rb") as file:
            continues = self._is_same(file)
            if not continues:
                self._forget()
            return self._read(file, continues)

    def _read(self, file: Any, continues: bool) -> NewRows:
        self._inode = os.fstat(file.fileno()).st_ino
        file.seek(self._offset)
        *lines, rest = file.read().split(b"\n")
        self._offset += sum(map(len, lines)) + len(lines)
        self._seal = self._seal_of(file)
        rows, damage = _parsed(lines, self._lines + 1)
        self._lines += len(lines)
        self._damage += damage
        unfinished = [f"line {self._lines + 1}: {UNFINISHED}"] if rest else []
        return NewRows(rows, self._damage + unfinished, continues)

    def _is_same(self, file: Any) -> bool:
        found = os.fstat(file.fileno())
        if self._offset == 0:
            return True
        # A number of a file may be used again, once the file that had it was replaced: its end tells them apart.
        is_same = found.st_ino == self._inode and found.st_size >= self._offset
        return is_same and self._seal_of(file) == self._seal

    def _seal_of(self, file: Any) -> int:
        start = max(self._offset - _SEAL, 0)
        file.seek(start)
        return zlib.crc32(file.read(self._offset - start))


# --- lines ------------------------------------------------------------------------------------------------------------


def _parsed(lines: Sequence[bytes], first: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    damage: list[str] = []
    for start in range(0, len(lines), _TOGETHER):
        some = lines[start : start + _TOGETHER]
        together = _parsed_together(some)
        if together is None:
            for number, line in enumerate(some, start=first + start):
                row, problem = _parsed_line(line)
                problem = problem or _row_problem(row)
                if row is None or problem:
                    damage.append(f"line {number}: {problem}")
                else:
                    rows.append(row)
        else:
            rows += together
    return rows, damage


def _parsed_together(lines: Sequence[bytes]) -> list[Row] | None:
    """Parse lines in one call, which takes half as long as one each; return None unless all are rows."""
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return None
    text = b",\n".join(lines)  # no string of JSON goes on over a line break
    try:
        found = parse_json(b"[" + text + b"]")
    except ValueError:
        return None
    if len(found) != len(lines) or any(map(_row_problem, found)):
        return None
    # Few rows have such a value, and to look for it in a row takes longer than to read it.
    return [revived(row) for row in found] if b'"NaN"' in text or b'Infinity"' in text else found


def _parsed_line(line: bytes) -> tuple[Row | None, str]:
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        return None, f"not a JSON object: {line[:80].decode(errors='replace')!r}"
    return (revived(row) if b'"NaN"' in line or b'Infinity"' in line else row), ""


def _row_problem(row: Any) -> str:
    """Return what a row lacks; empty if nothing. Called for each row of long files."""
    timing = row.get("timing")
    if type(timing) is not dict or not _is_count(row.get("step")) or not _is_time(timing.get("wall")):
        return "a row without step and time"
    if "elapsed" in timing and not _is_time(timing["elapsed"]):
        return f"elapsed={timing['elapsed']!r} is not a number of seconds"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LATEST


def _is_time(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and 0 <= value <= LATEST
