"""What one rank puts into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint.codec import Encoded, as_tensors, encoded, state_bytes, state_files
from windlass.checkpoint.history import History
from windlass.checkpoint.sharded import RankParts
from windlass.checkpoint.split import SPLIT_INDEX_NAME, save_split
from windlass.checkpoint.staged import StagedCheckpoint, rank_stem
from windlass.checkpoint.tensor_file import nbytes
from windlass.checkpoint.weights import LARGEST_FILE, WEIGHTS_NAME, is_split, save_weights, weights_bytes
from windlass.core.types import State

_MARGIN = 1 << 20  # bytes of JSON, headers and file system blocks beside the tensors


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that this rank has for one checkpoint. The writer rank of the folder writes what ranks share.

    Attributes:
        shared: states that ranks share, by name.
        per_rank: states of this rank.
        weights: whole weights by name, for each file; shared.
        layout: makes the tensors to write of those weights, if they are not written as they are in memory.
        parts: this rank's parts of sharded tensors.
        files: further plain files (configuration, tokenizer) by relative name; shared.
        write_model: called with the folder on the writer rank; a script's own way to save, which needs the live model.
        other_bytes: size of what `write_model` will write, for the check of free space.
        history: the older rows of `log_history`; shared. Its states are among `shared`.
    """

    shared: Mapping[str, State | Encoded] = field(default_factory=dict)
    per_rank: State | Encoded = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layout: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    parts: Sequence[RankParts] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    write_model: Callable[[Path], None] | None = None
    other_bytes: int = 0
    history: History | None = None

    def encoded(self) -> Content:
        """The same with all states split into trees and tensors, which detects what cannot be saved."""
        shared = {name: encoded(state) for name, state in self.shared.items()}
        weights = {file: as_tensors(tensors) for file, tensors in self.weights.items()}
        return replace(self, shared=shared, per_rank=encoded(self.per_rank), weights=weights)

    def tensor_bytes(self) -> int:
        """Bytes of the tensors that this rank would write if it were the writer rank."""
        states = [*self.shared.values(), self.per_rank]
        tensors = [tensor for part in self.parts for tensor in part.tensors.values()]
        return (
            sum(map(state_bytes, states))
            + sum(map(nbytes, tensors))
            + sum(map(weights_bytes, self.weights.values()))
        )

    def disk_bytes(self, writers: int) -> int:
        """Estimated bytes of the checkpoint on a disk to which `writers` ranks write as much as this one."""
        own = state_bytes(self.per_rank) + sum(
            nbytes(t) for part in self.parts for t in part.tensors.values()
        )
        # `tensor_bytes` counts one rank's own parts too.
        shared = self.tensor_bytes() - own + (0 if self.history is None else self.history.new_bytes())
        return shared + own * writers + sum(map(len, self.files.values())) + self.other_bytes + _MARGIN

    def names(self, rank: int, is_writer: bool) -> set[str]:
        """The files that `write` creates on this rank, except those of `write_model`."""
        names = state_files(rank_stem(rank), self.per_rank)
        for part in self.parts:
            names |= part.names()
        if is_writer:
            names |= set(self.files).union(*(state_files(name, state) for name, state in self.shared.items()))
            names |= {_last_file(name, tensors) for name, tensors in self.weights.items()}
            names |= set() if self.history is None else {segment.name for segment in self.history.segments}
        return names

    def write(self, staged: StagedCheckpoint, is_writer: bool) -> None:
        """Write it into `staged`; shared parts only if this rank `is_writer`."""
        if is_writer:
            self._write_shared(staged)
        staged.write_rank_state(self.per_rank)
        for part in self.parts:
            staged.add(part.write(staged.folder, staged.files))

    def _write_shared(self, staged: StagedCheckpoint) -> None:
        for name, state in self.shared.items():
            staged.write_state(name, state)
        if self.history is not None:
            staged.add(self.history.write(staged.folder, staged.files))
        for name, tensors in self.weights.items():
            path = staged.folder / name
            staged.files.ensure_folder(path.parent)
            written = self.layout(tensors)
            if is_split(name, tensors):
                entries = save_split(path.parent, written, LARGEST_FILE, staged.files)
            else:
                entries = {path.name: save_weights(path.parent, written, name=path.name, files=staged.files)}
            folder = name.removesuffix(path.name)
            staged.add({f"{folder}{file}": entry for file, entry in entries.items()})
        for name, data in self.files.items():
            staged.write_file(name, data)
        if self.write_model is not None:
            self.write_model(staged.folder)


def _last_file(name: str, tensors: Mapping[str, Any]) -> str:
    """The name of the file that is written last of these weights."""
    return f"{name.rpartition(WEIGHTS_NAME)[0]}{SPLIT_INDEX_NAME}" if is_split(name, tensors) else name
