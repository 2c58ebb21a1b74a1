"""Packing a stream: rows are emitted once they are full, and the state of a pass can be saved between two rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from windlass.core.errors import DataError
from windlass.data.seeding import set_epochs

Array = np.ndarray[Any, Any]
Document = dict[str, Array]


class _Row:
    """A row that is being filled."""

    def __init__(self, documents: Iterable[Document] = ()) -> None:
        self.documents = list(documents)
        self.filled = sum(map(_length, self.documents))

    def add(self, document: Document) -> None:
        self.documents.append(document)
        self.filled += _length(document)

    def joined(self, bordered: bool) -> dict[str, Array]:
        """Its columns; `bordered`: with the documents' lengths."""
        columns = {name: np.concatenate([d[name] for d in self.documents]) for name in self.documents[0]}
        return {**columns, "seq_lengths": np.array([*map(_length, self.documents)])} if bordered else columns

    def state(self) -> dict[str, Any]:
        """A row as few arrays: a state is copied value by value."""
        return {"lengths": [*map(_length, self.documents)], "columns": self.joined(bordered=False)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Row:
        ends = np.cumsum(state["lengths"]).tolist()
        return cls(
            {name: np.asarray(values)[end - size : end] for name, values in state["columns"].items()}
            for end, size in zip(ends, state["lengths"], strict=True)
        )


class PackedStream(IterableDataset[dict[str, Array]]):
    """A stream of packed rows, made from a stream of documents by first fit.

    A document goes into the oldest open row in which it fits. If none has the space, a row is opened, and with more
    than `open_rows` of them the fullest one is emitted. The order of the rows depends on the documents alone, so every
    process that reads the stream packs the same rows.

    Args:
        documents: mappings whose values are lists of one length; iterable again for each pass. `set_epoch` is passed
            on to it, and so is the state of a pass, if it has `state_dict` and `load_state_dict`; otherwise the
            documents before the saved position are read again.
        seq_length: tokens of a row.
        strategy: what is done to a document longer than that: "bfd" cuts it, "bfd_split" makes pieces. "wrapped" puts
            all documents one after the other and cuts every `seq_length` tokens.
        open_rows: rows that are kept open; more of them leave less space unused.

    Yields rows with the documents' columns as NumPy arrays and, but for "wrapped", `seq_lengths`.
    """

    def __init__(
        self, documents: Iterable[Any], seq_length: int, strategy: str = "bfd", open_rows: int = 32
    ) -> None:
        self.documents, self.seq_length, self.strategy, self.open_rows = (
            documents,
            seq_length,
            strategy,
            open_rows,
        )
        self._begin()
        self._loaded: dict[str, Any] | None = None

    def _begin(self) -> None:
        self._read = 0
        self._ended = False
        self._open: list[_Row] = []
        self._ready: deque[_Row] = deque()
        self._columns: list[str] | None = None  # those of the first document that was read

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next pass on to the documents."""
        set_epochs(epoch, self.documents)

    def state_dict(self) -> dict[str, Any]:
        """The position after the row that was yielded last: documents read, and those that wait in open rows."""
        # The pass has not begun: what was read belongs to an earlier one.
        if self._loaded is not None:
            return self._loaded
        source = self.documents.state_dict() if self._has_state() else None  # type: ignore[attr-defined]
        return {
            "documents": source,
            "read": self._read,
            "ended": self._ended,
            "open": [row.state() for row in self._open],
            "ready": [row.state() for row in self._ready],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next pass at a position that `state_dict` returned."""
        self._loaded = state
        if state["documents"] is not None and not state["ended"] and self._has_state():
            self.documents.load_state_dict(state["documents"])  # type: ignore[attr-defined]

    def _has_state(self) -> bool:
        return all(
            callable(getattr(self.documents, name, None)) for name in ("state_dict", "load_state_dict")
        )

    def __iter__(self) -> Iterator[dict[str, Array]]:
        documents = self._entered()
        while True:
            while self._ready:
                yield self._ready.popleft().joined(bordered=self.strategy != "wrapped")
            if self._ended:
                return
            document = next(documents, None)
            if document is None:
                self._ended = True
                self._ready.extend(self._open)
                self._open = []
            else:
                self._read += 1
                arrays = _arrays(document, self._read - 1, self._columns)
                self._columns = sorted(arrays)
                for piece in self._pieces(arrays):
                    self._place(piece)

    def _entered(self) -> Iterator[Any]:
        """The documents from the loaded position on, or from the first on."""
        self._begin()
        state, self._loaded = self._loaded, None
        if state is None:
            return iter(self.documents)
        self._read, self._ended = int(state["read"]), bool(state["ended"])
        self._open = [_Row.from_state(row) for row in state["open"]]
        self._ready = deque(_Row.from_state(row) for row in state["ready"])
        if self._ended:
            return iter(())
        documents = iter(self.documents)
        if state["documents"] is None or not self._has_state():
            for _ in range(self._read):
                next(documents, None)
        return documents

    def _pieces(self, document: Document) -> Iterator[Document]:
        length = _length(document)
        if self.strategy == "wrapped":
            return self._wrapped(document)
        # One piece, which the slice cuts; a document without tokens has none.
        step = length if self.strategy == "bfd" else self.seq_length
        starts = range(0, length, max(step, 1))
        return ({k: v[start : start + self.seq_length] for k, v in document.items()} for start in starts)

    def _wrapped(self, document: Document) -> Iterator[Document]:
        """Pieces that fill the one open row, then whole rows, then a rest."""
        start, length = 0, _length(document)
        while start < length:
            space = self.seq_length - (self._open[0].filled if self._open else 0)
            yield {k: v[start : start + space] for k, v in document.items()}
            start += space

    def _place(self, piece: Document) -> None:
        size = _length(piece)
        row = next((row for row in self._open if row.filled + size <= self.seq_length), None)
        if row is None:
            row = _Row()
            self._open.append(row)
        row.add(piece)
        if row.filled == self.seq_length:
            self._emit(row)
        elif len(self._open) > self.open_rows:
            # The fullest one wastes least.
            self._emit(max(self._open, key=lambda open_row: open_row.filled))

    def _emit(self, row: _Row) -> None:
        self._open.remove(row)
        self._ready.append(row)


def _arrays(document: Any, number: int, names: list[str] | None) -> Document:
    columns = {name: np.asarray(values) for name, values in document.items()}
    if names is not None and sorted(columns) != names:
        found = f"document {number} of the stream has the columns {', '.join(columns) or 'none'}"
        raise DataError(f"{found}, and those before it have {', '.join(names)}: give all of them the same")
    lengths = {name: values.shape[0] if values.ndim else -1 for name, values in columns.items()}
    if not columns or len(set(lengths.values())) != 1 or -1 in lengths.values():
        shown = {name: "no list" if length < 0 else length for name, length in lengths.items()}
        raise DataError(
            f"document {number} of the stream has the lengths {shown}: every column that is packed must be a list with "
            "one value for each token. Remove the other columns first."
        )
    return columns


def _length(document: Document) -> int:
    return len(next(iter(document.values())))
