"""`log_history` in checkpoints: a save writes new rows only.

`trainer_state.json` has the newest rows. Older ones are in segments, files of `SEGMENT_ROWS` rows that never change:
the next checkpoint has hard links to them, or copies. `log_history.json` lists them. A history of fewer than two
segments is in `trainer_state.json` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from windlass.checkpoint import codec, strict_json
from windlass.checkpoint.codec import Encoded
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.manifest import CheckpointInfo
from windlass.checkpoint.strict_json import MAX_JSON_BYTES, PreparedJson
from windlass.core.errors import CheckpointError
from windlass.core.metric_values import plain_metrics, plain_value
from windlass.core.types import State

STATE, INDEX, ROWS = "trainer_state", "log_history", "log_history"
SEGMENT_ROWS = 5000
SEGMENT_BYTES = 1 << 24
Row = dict[str, Any]
_STATE_TYPES: dict[str, tuple[type, ...]] = {
    "global_step": (int,),
    "max_steps": (int,),
    "num_input_tokens_seen": (int,),
    "total_flos": (int, float),
    "epoch": (int, float, type(None)),
    "log_history": (list,),
    "stateful_callbacks": (dict,),
    "best_metric": (int, float, type(None)),
    "best_global_step": (int, type(None)),
    "best_model_checkpoint": (str, type(None)),
}
_PLAIN = (int, float, str, type(None))
_NEVER_EQUAL = object()


class Stored(Protocol):
    """A checkpoint, as `manager.Checkpoint`."""

    @property
    def info(self) -> CheckpointInfo: ...

    def has(self, name: str) -> bool: ...

    def shared(self, name: str) -> State: ...

    def read_shared_file(self, name: str) -> bytes: ...


@dataclass(slots=True)
class Segment:
    """Rows that are written once."""

    first: int  # number of the first row
    rows: list[Row]  # the run's own objects
    text: bytes | None = None  # one line of JSON for each row; None once a committed checkpoint has it
    entry: FileEntry | None = None  # size and hash of the file
    home: Path | None = None  # the file in the newest committed checkpoint
    stamp: tuple[int, int] | None = None  # size and time of the last change of that file

    @property
    def name(self) -> str:
        return f"{INDEX}/{self.first:09d}.jsonl"

    def put(self, target: Path, files: Files) -> FileEntry:
        """Create the file `target` as a link, a copy, or from memory if no checkpoint has it any more."""
        if self.entry is None or not (self._link(target, files) or self._copy(target, files)):
            text = self.text
            if text is None:
                text = _text(_encoded_row(row)[0] for row in self.rows)
            self.entry = files.write(target, [text])
        self.stamp = _stamp(target)
        return self.entry

    def _link(self, target: Path, files: Files) -> bool:
        if self.home is None:
            return False
        with contextlib.suppress(OSError):
            # A file that was replaced under this name since must not get into another checkpoint.
            if _stamp(self.home) == self.stamp:
                files.link(self.home, target)
                return True
        return False

    def _copy(self, target: Path, files: Files) -> bool:
        if self.home is None:
            return False
        with contextlib.suppress(OSError, CheckpointError):
            data = files.read(self.home, MAX_JSON_BYTES)
            if files.write(target, [data]) == self.entry:
                return True
        target.unlink(missing_ok=True)
        return False


@dataclass(frozen=True, slots=True)
class History:
    """The history as one checkpoint holds it."""

    states: Mapping[str, State | Encoded]  # the shared parts that take the place of `trainer_state`
    segments: Sequence[Segment] = ()

    def new_bytes(self) -> int:
        """Bytes of the segments that no checkpoint has yet."""
        return sum(len(segment.text) for segment in self.segments if segment.text is not None)

    def write(self, folder: Path, files: Files) -> dict[str, FileEntry]:
        """Write the segments into the folder of a checkpoint; return size and hash by relative name."""
        if self.segments:
            files.ensure_folder(folder / INDEX)
        return {segment.name: segment.put(folder / segment.name, files) for segment in self.segments}


class HistoryKeeper:
    """Keeps the encoded and the saved rows of a run's `log_history`, a list that scripts may change.

    Replaced, inserted and removed rows are detected anywhere, and rows changed in place if they are not in a segment.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._copies: list[Any] = []  # of the rows behind the segments, as they were when they were encoded
        self._lines: list[str] = []
        self._planned: Sequence[Segment] = ()

    def plan(self, state: Mapping[str, Any]) -> History:
        """The history for a checkpoint of this `TrainerState`, which is given as a mapping."""
        history = state[ROWS]
        if not isinstance(history, list):
            self._forget()
            return History({STATE: codec.encoded(dict(state))})
        self._encode_new(history)
        self._cut(history)
        self._planned = tuple(self._segments)
        split = codec.encoded({**state, ROWS: []})
        tree = {**split.tree, ROWS: PreparedJson(f"[{', '.join(self._lines)}]")}
        states: dict[str, State | Encoded] = {STATE: Encoded(tree, split.tensors)}
        if self._segments:
            listed = [{"file": segment.name, "rows": len(segment.rows)} for segment in self._segments]
            states[INDEX] = {"rows": len(history), "segments": listed}
        return History(states, self._planned)

    def saved(self, folder: Path) -> None:
        """Called once the last plan is committed in this folder."""
        for segment in self._planned:
            segment.home, segment.text = folder / segment.name, None

    def resume(self, checkpoint: Stored, history: list[Row]) -> None:
        """Continue from a checkpoint; `history` is its whole history."""
        self._forget()
        for first, name, count in _listed(checkpoint):
            home = checkpoint.info.path / name
            segment = Segment(first, history[first : first + count], None, checkpoint.info.files[name], home)
            with contextlib.suppress(OSError):
                # Without a stamp the file is copied and checked, and not linked.
                segment.stamp = _stamp(home)
            self._segments.append(segment)

    def _forget(self) -> None:
        self._segments, self._copies, self._lines, self._planned = [], [], [], ()

    @property
    def _first(self) -> int:
        """Number of the first row that no segment holds."""
        return self._segments[-1].first + len(self._segments[-1].rows) if self._segments else 0

    def _encode_new(self, history: list[Row]) -> None:
        """Encode new and changed rows."""
        self._drop_changed(history)
        first = self._first
        rows = history[first:]
        del self._copies[len(rows) :], self._lines[len(rows) :]
        known = len(self._copies)
        changed = (
            [] if rows[:known] == self._copies else [i for i in range(known) if rows[i] != self._copies[i]]
        )
        for index in (*changed, *range(known, len(rows))):
            line, copy = _encoded_row(rows[index])
            # Slices: they replace a row that is known, and append one that is not.
            self._lines[index : index + 1], self._copies[index : index + 1] = [line], [copy]

    def _drop_changed(self, history: list[Row]) -> None:
        for index, segment in enumerate(self._segments):
            # Lists compare their items by identity first, so this looks into a row only if it is another object.
            if history[segment.first : segment.first + len(segment.rows)] != segment.rows:
                del self._segments[index:]
                self._copies, self._lines = [], []
                return

    def _cut(self, history: list[Row]) -> None:
        """Move rows older than the newest `SEGMENT_ROWS` into segments."""
        left = sum(map(len, self._lines))
        while len(self._lines) >= 2 * SEGMENT_ROWS or left >= 2 * SEGMENT_BYTES:
            count = size = 0
            while count < min(SEGMENT_ROWS, len(self._lines)) and size < SEGMENT_BYTES:
                size += len(self._lines[count])
                count += 1
            first, text = self._first, _text(self._lines[:count])
            self._segments.append(Segment(first, history[first : first + count], text))
            del self._lines[:count], self._copies[:count]
            left -= size


def is_segment(name: str) -> bool:
    """Return True if a file of a checkpoint is a segment."""
    return name.startswith(f"{INDEX}/")


def complete_state(checkpoint: Stored) -> State:
    """The `trainer_state` of a checkpoint with its whole history."""
    state = checkpoint.shared(STATE)
    if not checkpoint.has(INDEX):
        return state
    rows = [row for _, name, count in _listed(checkpoint) for row in _read(checkpoint, name, count)]
    newest, expected = state.get(ROWS), checkpoint.shared(INDEX).get("rows")
    if not isinstance(newest, list) or len(rows) + len(newest) != expected:
        raise CheckpointError(
            f"{checkpoint.info.path / INDEX}.json is malformed: it counts {str(expected)[:100]} rows, and its segments "
            f"hold {len(rows)} beside those of {STATE}.json"
        )
    return {**state, ROWS: rows + newest}


def checked_state(path: Path, state: Any) -> dict[str, Any]:
    """Return `state`, the content of a `trainer_state.json`, once its types are checked."""
    if not isinstance(state, dict) or "global_step" not in state:
        raise CheckpointError(f"{path} is not the state of a Trainer: it has no global_step")
    for name, kinds in _STATE_TYPES.items():
        # One that is missing counts as an empty value of its type.
        value = state.get(name, kinds[0]())
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CheckpointError(f"{path} is malformed: {name} is a {type(value).__name__}")
    rows = state.get(ROWS, [])
    if state["global_step"] < 0 or not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{path} is malformed: global_step is negative, or log_history holds no rows")
    return state


def _listed(checkpoint: Stored) -> list[tuple[int, str, int]]:
    """Number of the first row, file and number of rows of each segment."""
    if not checkpoint.has(INDEX):
        return []
    listed, first = list[tuple[int, str, int]](), 0
    segments = checkpoint.shared(INDEX).get("segments")
    for item in segments if isinstance(segments, list) else [None]:
        name, count = (item.get("file"), item.get("rows")) if isinstance(item, dict) else (None, None)
        if name != f"{INDEX}/{first:09d}.jsonl" or type(count) is not int or count < 1:
            what = f"segment {str(item)[:100]}"
            raise CheckpointError(f"{checkpoint.info.path / INDEX}.json is malformed: {what}")
        if name not in checkpoint.info.files:
            raise CheckpointError(f"{checkpoint.info.path / name} is missing: it is not in the manifest")
        listed.append((first, name, count))
        first += count
    return listed


def _read(checkpoint: Stored, name: str, count: int) -> list[Row]:
    path, data = checkpoint.info.path / name, checkpoint.read_shared_file(name)
    # A line break within a text is written as \n, so each one here ends a row.
    rows = strict_json.parse(b"[" + data.rstrip(b"\n").replace(b"\n", b",") + b"]", str(path))
    # Decoding visits every value, and few rows have one that JSON lacks.
    rows = codec.decode(rows, {}) if b'"$' in data else rows
    if len(rows) != count:
        raise CheckpointError(
            f"{path} is malformed: it holds {len(rows)} rows, and {INDEX}.json says {count}"
        )
    return list(rows)


def _encoded_row(row: Any) -> tuple[str, Any]:
    """A row as JSON, and a copy that is unequal to the row once that has changed."""
    tree = _encoded(row)
    # A copy shares what is within a container, so that a change there would not be seen.
    plain = isinstance(row, dict) and all(isinstance(value, _PLAIN) for value in row.values())
    return json.dumps(tree, allow_nan=False), dict(row) if plain else _NEVER_EQUAL


def _encoded(row: Any) -> Any:
    """In rows of a script, tensors become numbers, and what cannot be saved becomes text."""
    with contextlib.suppress(CheckpointError):
        tree, tensors = codec.encode({ROWS: row})
        if not tensors:
            return tree[ROWS]
    values = plain_metrics(row) if isinstance(row, Mapping) else plain_value(row, ROWS)
    return codec.encode({ROWS: values})[0][ROWS]


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _stamp(path: Path) -> tuple[int, int]:
    # Not the time of the inode's change, which each further link sets.
    status = os.stat(path, follow_symlinks=False)
    return status.st_size, status.st_mtime_ns
