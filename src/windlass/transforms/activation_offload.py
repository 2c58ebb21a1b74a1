"""Activations in host memory from the forward to the backward (as in arXiv:1602.08124), copied beside the computation.

A tensor that the backward needs is copied to pinned host memory on a stream of its own; the device's memory is free as
soon as the copy has ended. In the backward the copies that are needed next are fetched while the device still computes.
Values come back with the same bits.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.core.logs import get_job_logger, warn_once

_log = get_job_logger(__name__)
MIN_BYTES = 64 * 1024  # below, starting a copy costs more than it saves
_LEAVING = 4  # copies under way to the host before the device waits for the first of them
_AHEAD = 3  # tensors that are fetched before the backward asks for them


class DirectLane:
    """Copies between a device and the host, complete when they return."""

    def to_host(self, block: Tensor) -> tuple[Tensor, Any]:
        """Start to copy `block`; returns the copy, and a token for `wait` and `is_done`."""
        return block.to("cpu", copy=True), None

    def to_device(self, copy: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Start to copy it back; returns the new block and a token for `wait`."""
        return copy.to(device, copy=True), None

    def wait(self, token: Any) -> None:
        """Let the device's computation wait for a copy; the host does not wait."""

    def is_done(self, token: Any) -> bool:
        """Return True if a copy has ended."""
        return True


class StreamLane(DirectLane):
    """Copies on a stream of their own, through pinned memory, which torch reuses when a copy is freed."""

    def __init__(self, device: torch.device) -> None:
        self._api, self._device = torch.get_device_module(device), device
        self._stream = self._api.Stream(device)

    def to_host(self, block: Tensor) -> tuple[Tensor, Any]:
        copy = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        self._stream.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(self._stream):
            copy.copy_(block, non_blocking=True)
            return copy, self._stream.record_event()

    def to_device(self, copy: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        # In memory of the computation's stream, which may have work on it: the copy starts after that.
        block = torch.empty(copy.shape, dtype=copy.dtype, device=device)
        self._stream.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(self._stream):
            block.copy_(copy, non_blocking=True)
            return block, self._stream.record_event()

    def wait(self, token: Any) -> None:
        self._api.current_stream(self._device).wait_event(token)

    def is_done(self, token: Any) -> bool:
        return bool(token.query())


@dataclass(eq=False)
class _Block:
    """A piece of memory with saved tensors in it: its copy on the host, and what is on its way back."""

    source: StorageWeakRef  # the storage that it was copied from
    number: int  # its place in the order of the forward
    copy: Tensor
    token: Any  # of the copy to the host
    device: torch.device
    lane: DirectLane
    users: int = 0  # saved tensors in it that a backward has not asked for
    held: Tensor | None = None  # the block on the device while it has users
    # The block that is being copied back, and the token of that copy
    arriving: tuple[Tensor, Any] | None = None
    # Returns the block on the device while anything has it
    arrived: Callable[[], Tensor | None] = field(default=lambda: None)

    def fetch(self) -> None:
        """Start to copy it back, unless it is there."""
        if self.arriving is None and self.arrived() is None:
            self.lane.wait(self.token)
            self.arriving = self.lane.to_device(self.copy, self.device)

    def on_device(self) -> Tensor:
        """The block on the device. Its copy on the host stays, for a second backward through the same graph."""
        block = self.arrived()
        if block is None:
            self.fetch()
            assert self.arriving is not None, "fetched above"
            block, token = self.arriving
            self.lane.wait(token)
            self.arriving, self.arrived = None, weakref.ref(block)
        self.users -= 1
        self.held = block if self.users > 0 else None
        return block

    def __del__(self) -> None:
        if self.arriving is not None:  # fetched and not needed: its memory is free once the copy has ended
            self.lane.wait(self.arriving[1])


class ActivationOffload:
    """Moves what the backward needs to the host.

    These are not moved: tensors on the host, parameters, their views and the copies that autocast makes of them, small
    tensors, subclasses of tensors, and tensors that a recomputation saves in the backward. Memory that several saved
    tensors share is copied once.

    Args:
        lane_of: returns how tensors of a device are copied; None leaves them there.
        min_bytes: size of the smallest tensors that are moved.
    """

    def __init__(
        self, lane_of: Callable[[torch.device], DirectLane | None] | None = None, min_bytes: int = MIN_BYTES
    ) -> None:
        self._lane_of, self._min_bytes = lane_of or functools.cache(_lane_of), min_bytes
        self._by_source: weakref.WeakValueDictionary[tuple[Any, ...], _Block] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._count = 0
        # The device's memory of copies that are under way.
        self._leaving: deque[tuple[Tensor, DirectLane, Any]] = deque()

    def __reduce__(self) -> Any:
        # A copy of a model, pickled or not, has no part in this one's saved tensors.
        return ActivationOffload, (None, self._min_bytes)

    def saving(self) -> AbstractContextManager[Any]:
        """Context of a forward whose saved tensors are moved."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        lane = None if self._stays(tensor) else self._lane_of(tensor.device)
        if lane is None:
            return tensor
        # With gaps, as a slice has, only the elements themselves are moved.
        tensor = tensor.detach() if _span(tensor) <= tensor.numel() else tensor.detach().contiguous()
        block = self._block(tensor, lane)
        block.users += 1
        return block, tensor.size(), tensor.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        block, size, stride = packed
        # The backward needs memory: that of copies which are still under way is waited for.
        self._release(0)
        found: Tensor = block.on_device().as_strided(size, stride)
        for number in range(block.number - 1, max(block.number - 1 - _AHEAD, -1), -1):
            needed_next = self._by_number.get(number)
            if needed_next is not None and needed_next.users > 0:
                needed_next.fetch()
        return found

    def _stays(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.numel() * tensor.element_size() < max(self._min_bytes, 1)
            or torch._C._current_graph_task_id() != -1  # in a backward
            or _is_of_parameter(tensor)
        )

    def _block(self, tensor: Tensor, lane: DirectLane) -> _Block:
        """The block from the first to the last element of `tensor`."""
        flat = tensor.as_strided((_span(tensor),), (1,))
        # Each block has such a reference, which keeps the storage's address from being used again.
        source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        key = (source.cdata, tensor.storage_offset(), len(flat), tensor.dtype, tensor._version)
        known = self._by_source.get(key)
        if known is not None and not known.source.expired():  # type: ignore[no-untyped-call]
            return known
        self._release(_LEAVING)
        copy, token = lane.to_host(flat)
        block = _Block(source, self._count, copy, token, tensor.device, lane)
        self._count += 1
        self._by_source[key] = self._by_number[block.number] = block
        self._leaving.append((flat, lane, token))
        return block

    def _release(self, most: int) -> None:
        """Release the device's memory of copies that have ended, and of the oldest ones beyond `most` that have not."""
        while self._leaving:
            _, lane, token = self._leaving[0]
            if not lane.is_done(token):
                if len(self._leaving) <= most:
                    return
                lane.wait(token)
            self._leaving.popleft()


def _span(tensor: Tensor) -> int:
    """Number of elements from the first to the last one in memory."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether it shares memory with a parameter, or is the copy in another dtype that autocast keeps as well."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def _lane_of(device: torch.device) -> DirectLane | None:
    if device.type == "cpu":
        warn_once(_log, "Activations on a CPU are in host memory already: offloading them has no effect.")
    if device.type in ("cpu", "meta"):
        return None
    return StreamLane(device) if hasattr(torch.get_device_module(device), "Stream") else DirectLane()
