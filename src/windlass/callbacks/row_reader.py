"""The whole rows of a `metrics.jsonl`: of all of it, or of what was appended since the last look."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.callbacks.metrics_log import FILE_NAME
from windlass.callbacks.rows import Row, revived
from windlass.core.clock import LATEST
from windlass.core.errors import DataError
from windlass.core.plain_text import parse_json

# Of the last line of a file: the run writes it now, or was killed while it did.
UNFINISHED = "an unfinished line"
_TOGETHER = 500  # lines that are parsed in one call
_SEAL = 512  # bytes before a position, by which a file is recognised


def whole_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the whole rows, and for each other line which it is and what is wrong with it."""
    if not path.is_file():
        return [], []
    *lines, rest = path.read_bytes().split(b"\n")
    rows, damage = _parsed(lines, 1)
    return rows, damage + _unfinished(rest, len(lines))


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
        return NewRows(rows, self._damage + _unfinished(rest, self._lines), continues)

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
                if row is None:
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
    if problem := _row_problem(row):
        return None, problem
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


def _unfinished(rest: bytes, lines: int) -> list[str]:
    return [f"line {lines + 1}: {UNFINISHED}"] if rest else []
