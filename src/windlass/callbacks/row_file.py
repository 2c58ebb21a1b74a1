"""Files of rows, one JSON object a line: appended whole, and cut back when a run resumes at an earlier step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from windlass.callbacks.rows import Row, repeatable
from windlass.config.callback_interface import Args
from windlass.core.locations import local_folder
from windlass.core.logs import get_logger
from windlass.core.whole_file import BINARY, NO_FOLLOW, OutputFolder, parse_json

logger = get_logger(__name__)

_MAX_LINE = 1 << 24


class RowFile:
    """The file of rows of a Trainer's runs. A run that begins at step 0 renames an older file to the next free name; a
    resumed one cuts the file back to the step of its checkpoint, so that it equals that of an uninterrupted run.

    Args:
        path: its folder is created when the first row is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder: OutputFolder | None = None
        self._opened = False
        self._rows_before_training = False  # of this run: an evaluation before `train()`
        self._kept_at_cut: list[Row] = []
        self._due: Callable[[], None] | None = None  # what must be done to the file before another row

    def of_run(self, args: Args) -> RowFile:
        """Return the file of this name in the folder that a run's arguments name: this one if it is there."""
        folder = local_folder(args.output_path).absolute()
        return self if folder == self.path.parent else RowFile(folder / self.path.name)

    def begin(self, step: int) -> None:
        """Called when training begins, at this step. A file that cannot be changed now, as on a full disk, is warned of
        and changed before the next row.
        """
        if step > 0:
            self._due = partial(self._cut_back, step)
        elif not self._rows_before_training:
            self._due = partial(set_aside, self.path)
        self._rows_before_training, self._opened = False, True
        # Of a resumed run that failed, which had no end: this run's equal rows are others.
        self._kept_at_cut = []
        self._try_due()

    def end(self) -> None:
        """Called when training has ended."""
        self._kept_at_cut = []

    def roll_back(self, step: int) -> None:
        """Remove the rows after the step that a run rolled back to; before the next row, if it is not possible now."""
        self._due = partial(self._cut_back, step)
        self._try_due()

    def _try_due(self) -> None:
        try:
            self._do_due()
        except OSError as error:
            message = "%s still has rows of an earlier run or of later steps; they are removed before the next row: %s"
            logger.warning(message, self.path, error)

    def _do_due(self) -> None:
        if self._due is not None:
            self._due()
            self._due = None

    def has(self, row: Row) -> bool:
        """Return True if a resumed run makes a row again that was kept, which counts once."""
        row = repeatable(row)
        if row not in self._kept_at_cut:
            return False
        self._kept_at_cut.remove(row)
        return True

    def append(self, *rows: Row) -> None:
        """Append all rows, or nothing. Raises OSError."""
        self._folder = self._folder or OutputFolder(self.path.parent)
        self._folder.check()
        self._do_due()
        if not self._opened:
            self._open_outside_training()
        append_lines(self.path, *rows)

    def _open_outside_training(self) -> None:
        if self.path.is_symlink():  # rows are never written to where a link leads
            set_aside(self.path)
        self._rows_before_training = not self.path.exists()
        drop_torn_line(self.path)
        self._opened = True

    def _cut_back(self, step: int) -> None:
        try:
            self._kept_at_cut = cut_back(self.path, step)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged and cannot be continued", self.path)
            set_aside(self.path)
            self._kept_at_cut = []


def append_lines(path: Path, *rows: Row) -> None:
    """Append the lines of all rows or nothing: an incomplete write is truncated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a plain file")  # opening a pipe would wait for a reader
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW | BINARY
    with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            written = file.write(lines)
            if written != len(lines):
                raise OSError(f"only {written} bytes of the lines were written")
        except OSError:
            file.truncate(end)
            raise


def drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    size = path.stat().st_size
    whole = _end_of_lines(path)
    if whole != size:
        logger.warning("%s ends in an unfinished line, which is dropped", path)
        os.truncate(path, whole)


def _end_of_lines(path: Path) -> int:
    """Return the end of the last whole line, searched from the end of the file, which may be long."""
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


def set_aside(path: Path) -> None:
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(older := path.with_name(f"{path.stem}-{number}{path.suffix}")):
        number += 1
    os.rename(path, older)
    logger.warning("%s has the rows of an earlier run; renamed to %s", path, older.name)


def cut_back(path: Path, step: int) -> list[Row]:
    """Replace the file by its rows up to `step`, without summaries, since the run continues. Return the rows of `step`
    itself, without timing: a resumed run may log them again.
    """
    if not path.exists():
        set_aside(path)  # a link that leads nowhere
        return []
    last: list[Row] = []
    partial = path.with_name(path.name + ".tmp")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:
        for line in _whole_lines(path):
            row = parse_json(line)
            if row["step"] <= step and row.get("event") != "summary":
                file.write(line)
            if row["step"] == step and row.get("event") != "summary":
                last.append(repeatable(row))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return last


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines. Raises ValueError if it is not a plain file, or a line is too long to be a row."""
    if not path.is_file():
        raise ValueError(f"{path} is not a plain file")
    with open(path, "rb") as file:
        while line := file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE:
                raise ValueError(f"{path} has a line of {_MAX_LINE:,} bytes or more")
            if line.endswith(b"\n"):
                yield line
