"""Follows the memory of every tensor while one update runs, and counts what the update computes and sends.

PyTorch has a tracker of its own (`torch.distributed._tools`). It keeps figures for whole modules; this one keeps, for
each place in the update, the owners of its peak, which is what a reader asks for and what layers can be added up by.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.core.attributes import attributes_of
from windlass.core.tensors import is_fake
from windlass.core.trees import tensors_in
from windlass.forecast.places import ModulePlaces, pattern
from windlass.forecast.work import Sent, Work, grouped_product, sent_by, work_of
from windlass.transforms.buffers import inner_tensors

WEIGHTS, BUFFERS, GRADIENTS, STATE = "weights", "buffers", "gradients", "optimizer state"
ACTIVATIONS, LOGITS, BUCKETS, COPIES = "activations", "logits", "buckets", "copies of weights"
TEMPORARY, BATCH, SAVED = "temporary", "batch", "copy of a save"
AVERAGE, OTHERS = "averaged weights", "other models"
KINDS = (
    WEIGHTS,
    GRADIENTS,
    STATE,
    AVERAGE,
    OTHERS,
    ACTIVATIONS,
    LOGITS,
    COPIES,
    BUCKETS,
    TEMPORARY,
    BUFFERS,
    BATCH,
    SAVED,
)


class Owner(NamedTuple):
    """What memory is for, and the module that it belongs to, with `*` for the numbers of layers."""

    kind: str
    place: str


class Instant(NamedTuple):
    """A place in the update. `part`: of a stack of layers, the "first", "middle" or "last" one; "" elsewhere."""

    stage: str
    part: str
    place: str


class Peak(NamedTuple):
    """The bytes at the peak of a moment, by owner."""

    total: int
    owners: Mapping[Owner, int]


class _Tracked:
    __slots__ = ("forward", "nbytes", "owner")

    def __init__(self, nbytes: int, owner: Owner, forward: bool) -> None:
        self.nbytes, self.owner, self.forward = nbytes, owner, forward


class Meter(TorchDispatchMode):
    """Follows storages from their first operation until they are freed.

    Args:
        places: the module of the present operation.
        part_of: the name of a module -> the part of the stack that it is in.
        width: the entries of the vocabulary: tensors with a last axis of so many are logits; 0 without a vocabulary.

    Attributes:
        stage: the name of what is being done; that of moments.
        times: how often an update does it.
        peaks: for each moment the largest memory.
        work, sent: operations by their size, and bytes by collective.
    """

    def __init__(self, places: ModulePlaces, part_of: Callable[[str], str], width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage, self.times = "begin", 1
        self.peaks: dict[Instant, Peak] = {}
        self.work: Counter[Work] = Counter()
        self.sent: Counter[Sent] = Counter()
        self._places, self._part_of, self._width = places, part_of, width
        self._blocks: dict[int, _Tracked] = {}
        self._totals: Counter[Owner] = Counter()
        self._now = self._within = 0
        self._moments: dict[tuple[str, bool, str], Instant] = {}
        self._kind: str | None = None
        self._is_first = True

    def begin_again(self) -> None:
        """Forget what was seen; memory that exists is still followed."""
        self._is_first = False
        self.peaks.clear()
        self.work.clear()
        self.sent.clear()

    # --- owners -------------------------------------------------------------------------------------------------------

    def adopt(self, tensor: Tensor, kind: str, place: str) -> None:
        """Name the owner of a tensor: one that exists, or one that is known to be something else by now."""
        storage = local_part(tensor).untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            self._enter(storage, Owner(kind, pattern(place)), forward=False)
        else:
            self._rename(block, Owner(kind, pattern(place)))

    def keep(self, tensor: Tensor) -> Tensor:
        """Called with what autograd saves for the backward."""
        block = self._blocks.get(local_part(tensor).untyped_storage()._cdata)
        if block is not None and block.owner.kind == TEMPORARY:
            self._rename(block, Owner(ACTIVATIONS, block.owner.place))
        return tensor

    def keep_all(self) -> None:
        """Called when a backward begins: what forwards left in memory is there for it."""
        for block in list(self._blocks.values()):
            if block.forward and block.owner.kind == TEMPORARY:
                self._rename(block, Owner(ACTIVATIONS, block.owner.place))

    def as_kind(self, kind: str) -> AbstractContextManager[None]:
        """Within the body, new memory is of this kind."""
        return attributes_of(self, _kind=kind)

    def repeated(self, times: int) -> AbstractContextManager[None]:
        """Within the body, operations count so many times."""
        return attributes_of(self, times=self.times * times)

    def hold(self, owner: Owner, nbytes: int) -> None:
        """Count memory that no tensor of the update has."""
        self._change(owner, nbytes)
        self._see(self.stage, False, "")

    def _rename(self, block: _Tracked, owner: Owner) -> None:
        self._change(block.owner, -block.nbytes)
        block.owner = owner
        self._change(owner, block.nbytes)

    def _change(self, owner: Owner, nbytes: int) -> None:
        self._now += nbytes
        self._totals[owner] += nbytes
        if not self._totals[owner]:
            del self._totals[owner]

    def _enter(self, storage: torch.UntypedStorage, owner: Owner, forward: bool) -> None:
        key, block = storage._cdata, _Tracked(storage.nbytes(), owner, forward)
        self._blocks[key] = block
        self._change(owner, block.nbytes)
        # At the end of the process nothing needs the figures, and modules are gone.
        weakref.finalize(storage, self._freed, key, block).atexit = False

    def _freed(self, key: int, block: _Tracked) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key]
            self._change(block.owner, -block.nbytes)

    # --- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its parts come here one by one
        given = kwargs or {}
        answer = answer_of(func, args, given)
        found = func(*args, **given) if answer is None else answer
        if func in _UNSEEN:
            return found
        if self._is_first:
            self._find_others(args, given)
        place, backward = self._places.now()
        outputs = list(tensors_in(found))
        for output in outputs:
            self._look(output, func, args, place, backward)
        self._see(self.stage, backward, place)
        message = sent_by(func, args)
        if message is not None:
            self.sent[message] += self.times
        elif (done := work_of(func, args, given, found, outputs)) is not None:
            self.work[done] += self.times
        return found

    def _find_others(self, *given: Any) -> None:
        """What is read and was not made here: the weights of a reference, or of a teacher, which no list names."""
        for part in itertools.chain.from_iterable(map(inner_parts, tensors_in(given))):
            # Others are numbers of the code, which are small.
            if not is_fake(part) or getattr(part, "constant", None) is not None:
                continue
            storage = part.untyped_storage()
            if storage._cdata not in self._blocks:
                self._enter(storage, Owner(self._kind or OTHERS, ""), forward=False)

    def _look(self, output: Tensor, func: Any, args: tuple[Any, ...], place: str, backward: bool) -> None:
        storage = output.untyped_storage()
        if storage._cdata in self._blocks:
            return
        kind = self._kind or self._kind_of(output, func, args)
        self._enter(storage, Owner(kind, pattern(place)), forward=not backward)

    def _kind_of(self, output: Tensor, func: Any, args: tuple[Any, ...]) -> str:
        if func is torch.ops.aten._to_copy.default:
            source = self._blocks.get(args[0].untyped_storage()._cdata)
            if source is not None and source.owner.kind in (WEIGHTS, BUCKETS):
                return COPIES
        if self._width and output.ndim > 1 and output.shape[-1] == self._width and self._is_new(output):
            return LOGITS
        return TEMPORARY

    def _is_new(self, output: Tensor) -> bool:
        return output.numel() == output.untyped_storage().nbytes() // output.element_size()

    def _see(self, stage: str, backward: bool, place: str) -> None:
        key = (stage, backward, place)
        moment = self._moments.get(key)
        if moment is None:
            direction = f"{stage}: backward" if backward else stage
            moment = self._moments[key] = Instant(direction, self._part_of(place), pattern(place))
        peak = self.peaks.get(moment)
        if peak is None or self._now > peak.total:
            # The owners are copied at a new peak alone, which few operations are.
            self.peaks[moment] = Peak(self._now, dict(self._totals))

    def resizing(self) -> AbstractContextManager[None]:
        """Within the body, storages that are freed or grown in place are followed."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                self._change(block.owner, size - block.nbytes)
                block.nbytes = size
            return result

        return attributes_of(torch.UntypedStorage, resize_=resized)


def inner_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with the memory of this rank's part: those inside a tensor of few bits, or the part."""
    part = local_part(tensor)
    return inner_tensors(part) or [part]


def bytes_of(tensor: Tensor) -> int:
    """Bytes of this rank's part."""
    return sum(part.numel() * part.element_size() for part in inner_parts(tensor))


def whole_bytes_of(tensor: Tensor) -> int:
    """Bytes of the whole tensor, over all ranks that have parts of it."""
    if not inner_tensors(part := local_part(tensor)):
        return tensor.numel() * tensor.element_size()
    # Few bits are kept in parts of equal sizes only.
    return bytes_of(tensor) * tensor.numel() // part.numel()


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# They return values of Python, which no memory holds.
_UNSEEN = (
    torch.ops.prim.device.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
)


def answer_of(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    """What takes the place of an operation whose result depends on values that no memory has; None for any other. A
    mask has no padding, a norm is finite, and every position is chosen: the most that memory can be needed for.
    """
    # While a run is built some weights have memory and others have none.
    if not any(is_fake(each) for each in args):
        if func is not torch.ops.aten._local_scalar_dense.default:
            return None
        with unset_fake_temporarily():  # the mode would read it of a copy without memory
            return func(*args, **given)
    tensor: Any = args[0]
    if func is torch.ops.aten._local_scalar_dense.default and tensor.constant is None:
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1
    if func is torch.ops.aten._grouped_mm.default:
        return grouped_product(*args, **given)
    if func in (torch.ops.aten.allclose.default, torch.ops.aten.equal.default):
        return True
    if func is torch.ops.aten.nonzero.default and tensor.constant is None:
        return torch.ops.aten.new_empty.default(tensor, (tensor.numel(), tensor.ndim), dtype=torch.int64)
    return None
