"""The trials of a search and what came of them, in one small file that is complete at any instant."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.whole_file import write_whole

FILE_NAME = "search.json"
FORMAT = 1
State = Literal["running", "complete", "pruned", "failed"]


@dataclass
class Record:
    """One trial of a study."""

    number: int  # from 0, in the order in which trials began
    name: str  # of its run, and of its folder below that of the search
    params: dict[str, Any]  # hyperparameters by name
    state: State = "running"
    values: list[float] = field(default_factory=list)  # the objectives; empty until it is complete
    reports: dict[int, float] = field(default_factory=dict)  # update -> objective of the evaluation after it
    # What gave the objectives; empty if not all are finite
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # why it was pruned or failed
    # What the space suggested, by name; it may return other values, made of these
    suggested: dict[str, Any] = field(default_factory=dict)


def stored_value(value: Any) -> Any:
    """Return a value as the file of a study returns it to a later process: tuples are lists. Raises TypeError or
    ValueError for a value that it cannot hold.
    """
    return json.loads(json.dumps(value, allow_nan=False))


class Study:
    """All trials of a search.

    Args:
        folder: of the search; a file of an earlier process is continued.
        directions: "minimize" or "maximize" for each objective.
        backend: what chooses the values.
        setup: what trials have in common, name -> value. Of a file that holds it, `setup` is that of its first process.

    Raises:
        ConfigError: the folder holds a search with other directions or another backend.
        DataError: its file is damaged.
    """

    def __init__(
        self, folder: Path, directions: Sequence[str], backend: str, setup: Mapping[str, str]
    ) -> None:
        self.path = folder / FILE_NAME
        self.directions, self.backend = tuple(directions), backend
        self.setup = dict(setup)
        self.trials = self._read() if os.path.lexists(self.path) else []

    def save(self) -> None:
        """Write the file. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        trials = [asdict(record) for record in self.trials]
        content = {
            "format": FORMAT,
            "backend": self.backend,
            "directions": self.directions,
            "setup": self.setup,
            "trials": trials,
        }
        # Whole at any instant: a search that is killed while it writes continues from the file before.
        write_whole(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def best(self) -> list[Record]:
        """The best complete trial; with several objectives all that no other one surpasses."""
        complete = [record for record in self.trials if record.state == "complete"]
        if len(self.directions) == 1:
            return sorted(complete, key=self._losses)[:1]
        return [one for one in complete if not any(self._surpasses(other, one) for other in complete)]

    def improves(self, value: float, other: float) -> bool:
        """Return True if a value of the only objective is better than another."""
        return value < other if self.directions[0] == "minimize" else value > other

    def _losses(self, record: Record) -> tuple[float, ...]:
        """The objectives as numbers that are better the lower they are."""
        signs = [1 if direction == "minimize" else -1 for direction in self.directions]
        return tuple(sign * value for sign, value in zip(signs, record.values, strict=True))

    def _surpasses(self, one: Record, other: Record) -> bool:
        mine, theirs = self._losses(one), self._losses(other)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    def _read(self) -> list[Record]:
        # A link would be replaced by a file at the first save, and what it leads to would stay as it was.
        if self.path.is_symlink() or not self.path.is_file():
            raise DataError(f"{self.path} is not a plain file")
        try:
            content = json.loads(self.path.read_text("utf-8"))
            found = content["backend"], tuple(content["directions"])
            self.setup = {str(k): str(v) for k, v in content.get("setup", self.setup).items()}
            trials = [_record(trial) for trial in content["trials"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path} is damaged ({error}); remove it to start a new search") from error
        if found != (self.backend, self.directions):
            was = f"backend={found[0]!r}, direction={list(found[1])}"
            fix = f"is another search, with {was}; choose another output_dir, or remove {FILE_NAME} there"
            raise ConfigError(Problem("output_dir", str(self.path.parent), fix))
        return trials


def _record(values: dict[str, Any]) -> Record:
    names = {item.name for item in fields(Record)}
    record = Record(**{name: value for name, value in values.items() if name in names})
    record.reports = {int(step): float(value) for step, value in record.reports.items()}
    if not all(math.isfinite(float(value)) for value in record.values):
        raise ValueError(f"trial {record.number} has the values {record.values}")
    return record
