"""One batch of this rank, pinned if asked for, and the protocol of what reads such batches from a position on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from windlass.core.device import has_accelerator
from windlass.core.trees import map_leaves
from windlass.data.bookmark import Bookmark


@dataclass(slots=True)
class DealtBatch:
    """One batch of this rank, as a part of the batch that all ranks hold together."""

    batch: Any  # the collated samples, in host memory; None until they are read
    shares: tuple[int, ...]  # samples of each rank in this batch, in rank order
    end: int  # position of the pass after this batch, in the reader's unit
    last: bool  # no batch follows in this pass, on any rank
    # Positions in the dataset of the samples in `batch`; empty if unknown
    ids: list[int] = field(default_factory=list)
    # Lets a later pass begin at `end` without reading the samples before; None if not needed or not available
    bookmark: Bookmark | None = None
    # This rank has no sample here. `batch` holds samples of another rank or of an earlier batch, and must have zero
    # weight.
    filler: bool = False
    # In the first batch of a pass over a stream, checksums of its first samples over all ranks
    marks: list[int] = field(default_factory=list)
    # How many times each of `ids` came before in this pass; empty if none did
    repeats: list[int] = field(default_factory=list)

    def pin_memory(self) -> DealtBatch:
        """Page-lock the batch; called by the `DataLoader` of a pool of workers."""
        self.batch = pin(self.batch)
        return self


class PassRequest(NamedTuple):
    """Which batches to read, and for whom."""

    epoch: int  # number of the pass
    start: int = 0  # position in it, in the reader's unit
    bookmark: Bookmark | None = None  # ignored if it was made at another position
    # The pass runs beside another one, or reads the data for another purpose than training: it uses worker processes
    # of its own and does not change Python's generator
    private: bool = False
    # Batches of one update of a Trainer; 0 in a user's loop. A resumed Trainer has read the first update before, so
    # reading it again does not change Python's generator.
    update: int = 0

    def at(self, start: int) -> PassRequest:
        """The same request from another position on."""
        return self._replace(start=start)


class BatchReader(Protocol):
    """A source of batches that can be entered at any position. All ranks get the same number of batches.

    A user's loop takes the batches one by one; a Trainer takes groups of them (`DealtLoader`).
    """

    @property
    def unit(self) -> str:
        """What positions count ("samples", "batches"): a saved one can be entered only where they count the same."""

    @property
    def total_batch_size(self) -> int | None:
        """Samples that a whole batch of all ranks holds; None if that varies."""

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        """The batches of a pass."""

    def count(self, epoch: int, start: int = 0) -> int | None:
        """Batches of a pass on each rank, from position `start` on; None if only reading shows it."""

    def position(self, epoch: int, batches: int) -> int:
        """Where batch number `batches` of a pass begins."""

    def reseed(self, seed: int) -> None:
        """Use another seed from now on."""


def wants_pinning(asked: bool) -> bool:
    """Return True if pinning was requested and there is an accelerator with its own memory."""
    if not asked or not has_accelerator():
        return False
    accelerator = torch.accelerator.current_accelerator()
    # PyTorch pins nothing for MPS, and warns of it.
    return accelerator is not None and accelerator.type != "mps"


def pin(batch: Any) -> Any:
    """The same batch with its CPU tensors page-locked; containers are rebuilt, everything else is unchanged."""
    return map_leaves(_pinned, batch, lambda part: hasattr(part, "pin_memory"))


def _pinned(value: Any) -> Any:
    # PyTorch raises an error for a tensor that a collator has put on an accelerator already.
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    return value.pin_memory()
