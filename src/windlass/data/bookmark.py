"""Positions at which a stream can be entered: its dataset's own state, and checksums that detect a wrong state."""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from windlass.core.tensors import bits_of
from windlass.data.datasets_nodes import has_shuffle_buffer

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), bool)


def checksum(sample: Any, begun: int = 0, within: bool = False) -> int:
    """A 32-bit number of the content of a sample, the same in any process: another one if the content differs, but for
    chance. An object of an unknown type counts with its attributes; `within` one, others count with their type alone,
    because objects may lead in a circle.
    """
    # Not `hash`, which Python salts for text in each process.
    if type(sample) in _PLAIN:
        return zlib.crc32(repr(sample).encode(), begun)
    again = functools.partial(checksum, within=within)
    if isinstance(sample, Mapping):
        for name, value in sample.items():
            begun = again(value, again(name, begun))
        return begun
    if isinstance(sample, (list, tuple)):
        try:
            # Token ids as one array take a thirtieth of the time that they take one by one.
            return zlib.crc32(array("q", sample), begun)
        except (TypeError, OverflowError):
            pass
        for value in sample:
            begun = again(value, begun)
        return begun
    if isinstance(sample, torch.Tensor):
        if sample.is_nested:
            return again(sample.unbind(), begun)
        if sample.layout != torch.strided:  # sparse, of any kind
            filled = sample.detach().to_sparse().coalesce()
            return again([filled.indices(), filled.values()], begun)
        # Callers let the host wait only for an accelerator's tensors that they see, and those of an object they do not.
        unread = sample.is_meta or (within and sample.device.type != "cpu")
        # As bits: NumPy has no bfloat16.
        content = b"" if unread else bits_of(sample.detach().cpu()).numpy().tobytes()
        return zlib.crc32(content, zlib.crc32(str(sample.dtype).encode(), begun))
    if isinstance(sample, np.ndarray) and sample.dtype.hasobject:
        return again(sample.tolist(), begun)  # its bytes are addresses
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return again([getattr(sample, item.name) for item in dataclasses.fields(sample)], begun)
    content_of = getattr(sample, "tobytes", None)  # of arrays and values of NumPy, and of images of PIL
    if callable(content_of):
        return zlib.crc32(content_of(), begun)
    if isinstance(sample, os.PathLike):  # has its text only once that was asked for
        return again(os.fspath(sample), begun)
    if isinstance(sample, _PLAIN):
        return zlib.crc32(repr(sample).encode(), begun)
    # The text of any other object may hold its address.
    begun = zlib.crc32(repr(type(sample).__name__).encode(), begun)
    # Python's own, which has slots too; a class of the script's may return its state in another form.
    attributes = None if within or isinstance(sample, type) else object.__getstate__(sample)
    return checksum(attributes, begun, within=True)


WITNESSES = 4  # samples that are compared: enough to show samples that a buffer lost
MAX_VALUES = 1_000_000  # of a state; it is copied, and written as JSON
_CHEAP = 256  # values of a state, copied in some 20 us; one twice as large is taken at every second row
_DEEPEST = 60  # levels of a state; less than checkpoints can nest, because it lies within other states there


class Bookmark(TypedDict):
    """A position in a pass over a stream, as a checkpoint stores it.

    Keys:
        epoch: the pass.
        position: samples of the pass before it.
        at: samples before the position at which `state` was taken; `position` or a little less.
        state: the dataset's own state; None if it has none that can be saved.
        reason: why there is none.
        marks: checksums of the samples that follow `position`.
    """

    epoch: int
    position: int
    at: int
    state: Any
    reason: str
    marks: list[int]


class StreamPlace(NamedTuple):
    """The dataset's state after its first `at` samples of a pass; or the reason why there is none."""

    at: int
    state: Any
    reason: str

    def bookmark(self, epoch: int, position: int, following: list[Any]) -> Bookmark:
        """What a checkpoint stores at `position`; `following` are the samples after it."""
        return Bookmark(
            epoch=epoch,
            position=position,
            at=self.at,
            state=self.state,
            reason=self.reason,
            marks=marks_of(following),
        )


def marks_of(samples: list[Any]) -> list[int]:
    """Checksums of the first few of `samples`."""
    return [checksum(sample) for sample in samples[:WITNESSES]]


def belongs(bookmark: Bookmark | None, epoch: int, position: int) -> bool:
    """Return True if `bookmark` was made at this position of this pass."""
    return bookmark is not None and (bookmark["epoch"], bookmark["position"]) == (epoch, position)


class Places:
    """Takes a dataset's state between samples, as often as its size allows.

    Args:
        dataset: what is being iterated.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # Once there is a reason, no state is asked for again: `state_dict` may be expensive, and fail in each row.
        self._reason = why_without_state(dataset)
        self._newest: StreamPlace | None = None
        self._rows, self._stride = 0, 1

    def after(self, position: int) -> StreamPlace:
        """The newest state, taken some rows before `position` at most. To be called once per row."""
        if self._reason:
            return StreamPlace(0, None, self._reason)
        self._rows += 1
        if self._newest is None or self._rows % self._stride == 0:
            self._newest = self._taken(position)
        return self._newest

    def _taken(self, position: int) -> StreamPlace:
        copier = _Copier()
        try:
            state = copier.copy(self._dataset.state_dict(), ())
        except _UnsavableError as refusal:
            self._reason = f"its state cannot be saved: {refusal}"
        except Exception as error:
            self._reason = f"its state_dict failed: {type(error).__name__}: {error}"
        if self._reason:
            return StreamPlace(0, None, self._reason)
        self._stride = 1 + copier.values // _CHEAP
        return StreamPlace(position, state, "")


def why_without_state(dataset: Any) -> str:
    """Why a stream cannot be entered in the middle; empty if it can, or if only the attempt shows it."""
    if not callable(getattr(dataset, "state_dict", None)) or not callable(
        getattr(dataset, "load_state_dict", None)
    ):
        return "it has no state_dict and load_state_dict"
    if has_shuffle_buffer(dataset):
        return "it shuffles through a buffer, whose samples are not part of its state"
    return ""


def why_read_again(dataset: Any, bookmark: Bookmark | None, epoch: int, start: int) -> str:
    """Why sample `start` can only be reached by reading up to it; empty if the pass may be entered there."""
    if not start:
        return ""
    if bookmark is None or not belongs(bookmark, epoch, start):
        return why_without_state(dataset) or "no state of it was saved at this position"
    return why_without_state(dataset) or bookmark["reason"]


def plain_copy(state: Any) -> tuple[Any, str]:
    """A copy of a state that checkpoints can hold, or else None and the reason."""
    try:
        return _Copier().copy(state, ()), ""
    except _UnsavableError as refusal:
        return None, str(refusal)


class _UnsavableError(Exception):
    """A value that checkpoints cannot hold."""


class _Copier:
    """Copies what a checkpoint can hold: a dataset may change the state that it returned."""

    def __init__(self) -> None:
        self.values = 0

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise _UnsavableError(f"it holds more than {MAX_VALUES} values")
        if len(path) > _DEEPEST:
            raise _UnsavableError(f"it is nested more than {_DEEPEST} deep")
        kind = type(value)
        # By type, as `checkpoint.codec` does: it refuses subclasses, such as an `IntEnum`.
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            return self._map(value, path)
        if kind is list or kind is tuple:  # not subclasses: a named tuple would come back as a plain one
            return kind(self.copy(item, (*path, str(index))) for index, item in enumerate(value))
        if isinstance(value, torch.Tensor):
            self.values += value.numel()
            return value.detach().to("cpu", copy=True)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            self.values += value.size
            return value.copy()
        raise _UnsavableError(f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}")

    def _map(self, value: dict[Any, Any], path: tuple[str, ...]) -> dict[Any, Any]:
        for key in value:
            if type(key) not in (str, int):
                raise _UnsavableError(f"{_shown(path)} has the key {key!r}, and keys must be str or int")
        return {key: self.copy(item, (*path, str(key))) for key, item in value.items()}


def _shown(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "the whole"
