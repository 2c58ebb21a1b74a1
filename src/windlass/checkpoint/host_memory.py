"""Copies in host memory of what is to be saved, so that training need not wait for the disk.

The copies lie in blocks that are kept from one snapshot to the next: from the second on no page is new, and on an
accelerator the blocks stay pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from windlass.checkpoint.codec import Encoded, encoded
from windlass.checkpoint.content import Content
from windlass.checkpoint.weights import split_aliases
from windlass.core.logs import get_logger
from windlass.core.types import State
from windlass.dist.gang import Gang

_logger = get_logger(__name__)
# Of the memory that the host has left, copies take at most this share: training needs some too.
_SHARE = 0.8
_CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """Blocks of host memory for one snapshot at a time.

    Args:
        device: where the tensors lie that are copied.
        limit: bytes that copies may take; None: a share of what is free on the machine.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._pinned, self._limit = device.type == "cuda", limit
        self._warned_too_large = False
        self._blocks: dict[str, Tensor] = {}
        self._taken: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(block.numel() * block.element_size() for block in self._blocks.values())

    def free(self) -> None:
        """Drop the blocks; a snapshot that is still being written keeps its own."""
        self._blocks = {}

    def try_snapshot(self, content: Content, all_ranks: Gang) -> tuple[Content, Callable[[], None]] | None:
        """`snapshot`; None if a rank has no memory for it, which is logged. Collective."""
        copied = None
        if self._fits(content.tensor_bytes(), all_ranks):
            try:
                copied = self.snapshot(content)
            except (MemoryError, RuntimeError) as error:  # raised, it would leave other ranks waiting
                _logger.info(
                    "no copy in host memory (%s): training waits while this checkpoint is written", error
                )
        return copied if all_ranks.vote(copied is not None) else None

    def _fits(self, needed: int, all_ranks: Gang) -> bool:
        """Return True if there is memory for copies of `needed` bytes. Collective."""
        room = self._limit
        if room is None:
            # The blocks of the last snapshot are used again.
            needed, room = room_on_machine(max(needed - self.nbytes, 0), all_ranks)
        if room is None or needed <= room:
            return True
        if not self._warned_too_large:
            self._warned_too_large = True
            _logger.warning(
                "a checkpoint needs %s bytes of host memory to be written in the background, and %s may be used: "
                "training waits while it is written",
                f"{needed:,}",
                f"{room:,}",
            )
        return False

    def snapshot(self, content: Content) -> tuple[Content, Callable[[], None]]:
        """A copy of `content` that nothing changes any more until the next snapshot, and what to call before it is
        read: it waits until copies from an accelerator have arrived, which later work there does not overtake.

        Raises:
            CheckpointError: a state holds a type that cannot be saved.
        """
        content = content.encoded()
        self._taken = set()
        copied = replace(
            content,
            shared={name: self._state(name, state) for name, state in content.shared.items()},
            per_rank=self._state("", content.per_rank),
            weights={file: self._weights(file, tensors) for file, tensors in content.weights.items()},
            parts=[replace(part, tensors=self._all(part.stem, part.tensors)) for part in content.parts],
        )
        for name in self._blocks.keys() - self._taken:
            del self._blocks[name]
        return copied, _arrival(devices_of(content))

    def _state(self, name: str, state: State | Encoded) -> Encoded:
        # Encoding makes containers of its own, so only the tensors are left to copy.
        split = encoded(state)
        return Encoded(split.tree, self._all(f"state {name}", split.tensors))

    def _weights(self, file: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tied tensors become one copy under several names: what is written tells them by their memory."""
        stored, aliases = split_aliases(weights)
        copies = self._all(file, stored)
        return {name: copies[aliases.get(name, name)] for name in weights}

    def _all(self, owner: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._copy(f"{owner}: {name}", tensor) for name, tensor in tensors.items()}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        block = self._blocks.get(name)
        if block is None or block.shape != tensor.shape or block.dtype != tensor.dtype:
            block = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
            self._blocks[name] = block
        self._taken.add(name)
        # On the stream that computes: the next update waits for it there, so the copy is that of this step.
        # PyTorch's copies from MPS are wrong if they are not waited for.
        return block.copy_(tensor, non_blocking=tensor.device.type != "mps")


def room_on_machine(more: int, all_ranks: Gang) -> tuple[int, int | None]:
    """The bytes that all ranks of this machine need, each `more` beyond what it holds, and those they may take of what
    is free there, if that is known. Collective.
    """
    gathered, machine = all_ranks.gather_objects([more, available_memory()]), all_ranks.on_machine
    here = gathered[machine.start : machine.stop] or gathered
    left = min((free for _, free in here if free is not None), default=None)
    return sum(needed for needed, _ in here), None if left is None else int(left * _SHARE)


def _arrival(devices: Iterable[torch.device]) -> Callable[[], None]:
    events = []
    for device in devices:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def devices_of(content: Content) -> set[torch.device]:
    """The accelerators from which tensors of `content` are copied asynchronously; its states are split already. Copies
    from MPS and XLA devices are complete when they return.
    """
    groups = [*content.weights.values(), *(part.tensors for part in content.parts)]
    states = [*content.shared.values(), content.per_rank]
    groups += [state.tensors for state in states if isinstance(state, Encoded)]
    return {
        tensor.device
        for group in groups
        for tensor in group.values()
        if tensor.device.type not in ("cpu", "mps", "xla")
    }


def available_memory() -> int | None:
    """Bytes of host memory that can still be taken without swapping, within the limits of the container; None where
    nothing tells (other systems than Linux).
    """
    known = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _of_container() -> int | None:
    """Of a version 2 control group: its limit, less what it holds that cannot be given back."""
    try:
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text("ascii"))
        stats = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        return max(int(limit) - used + int(stats.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None
