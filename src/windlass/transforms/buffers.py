"""Running statistics and other buffers, which each rank's forwards move on its own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.module_state import extra_states, set_state, unsaved_buffers
from windlass.core.tensors import bits_of, distinct, same_bits
from windlass.dist.gang import Gang

# What every backend sends in its own dtype.
_SENT = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


def is_ordinary(tensor: Tensor) -> bool:
    """Return True if PyTorch's own wrappers can send a tensor between ranks and write what arrives into it."""
    return (
        tensor.dtype in _SENT
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and distinct(tensor).shape == tensor.shape
    )


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values, in place; tensors of any dtype and strides. Sparse ones stay as each rank made
    them (see `check_sparse`). Collective.
    """
    with torch.no_grad():
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            own = distinct(tensor.detach())
            bits = bits_of(own)  # what the backend cannot send in its dtype, it can as bytes
            if bits.numel():
                torch.distributed.broadcast(bits, 0)
                if bits.data_ptr() != own.data_ptr():
                    own.copy_(bits.view(own.dtype).view(own.shape))


def check_sparse(module: nn.Module, gang: Gang) -> None:
    """Compare sparse tensors between ranks, which keep their own. Collective where there are any.

    Raises:
        ModelError: one differs; it is named.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    digests = {name: _digest(tensor) for name, tensor in named.items() if tensor.layout != torch.strided}
    if not digests:
        return
    found = gang.gather_objects(digests)
    other = sorted(name for name in digests if any(told.get(name) != found[0].get(name) for told in found))
    if other:
        raise ModelError(
            f"the sparse tensor {other[0]} differs between ranks, and cannot be sent: build it from the same values on "
            "every rank"
        )


def _digest(tensor: Tensor) -> str:
    if tensor.layout == torch.sparse_coo:
        sparse = tensor.detach().coalesce()
        pieces = [sparse.indices(), sparse.values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        pieces = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        pieces = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise ModelError(
            f"a tensor of layout {tensor.layout} cannot be compared between ranks; use a dense one"
        )
    digest = hashlib.sha256(f"{list(tensor.shape)}".encode())
    for piece in pieces:
        digest.update(bits_of(piece).cpu().numpy().tobytes())
    return digest.hexdigest()


def share_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers. Collective."""
    broadcast(module.buffers())


@contextlib.contextmanager
def buffers_of_first_rank(module: nn.Module) -> Iterator[None]:
    """Within the body every rank holds rank 0's buffers: those that are saved.

    Each rank's own follow its own data until the next forward, so without this an evaluation would be of several
    models, most of them not the one in the checkpoint. Collective.
    """
    buffers = _dense(module)
    own = [buffer.detach().clone() for buffer in buffers]
    share_buffers(module)
    try:
        yield
    finally:
        restore(buffers, own)


def _dense(module: nn.Module) -> list[Tensor]:
    """The buffers without sparse ones, which are taken to be constants: a checkpoint refuses one that has changed."""
    return [buffer for buffer in module.buffers() if buffer.layout == torch.strided]


def restore(buffers: Iterable[Tensor], saved: Iterable[Tensor]) -> None:
    """Copy saved values into buffers, in place."""
    with torch.no_grad():
        for buffer, value in zip(buffers, saved, strict=True):
            distinct(buffer).copy_(distinct(value, buffer))


class ForwardState:
    """Copies of what forwards change in a module: its buffers and extra states."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: list[Tensor] = []
        self.take()

    def take(self) -> None:
        """Copy what there is now, into the memory of earlier copies."""
        live = _dense(self._module)
        if [kept.shape for kept in self._buffers] != [buffer.shape for buffer in live]:
            self._buffers = [buffer.detach().clone() for buffer in live]
        else:
            for kept, buffer in zip(self._buffers, live, strict=True):
                kept.copy_(buffer.detach())
        self._extra = copy.deepcopy(extra_states(self._module))

    def restore(self) -> None:
        """Put them back, as often as it is called."""
        restore(_dense(self._module), self._buffers)
        if self._extra:
            set_state(self._module, copy.deepcopy(self._extra))


class OwnBuffers:
    """The buffers of a module that a checkpoint holds beside its state dict.

    Those that the state dict leaves out are saved if they changed since this object was made: constants are many, and
    every process makes them itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: _remembered(buffer) for name, buffer in unsaved_buffers(module).items()}

    def unsaved(self) -> dict[str, Tensor]:
        """Changed ones that the state dict leaves out, by name."""
        return {
            name: buffer.detach()
            for name, buffer in unsaved_buffers(self._module).items()
            if not _is_same(self._before.get(name), buffer)
        }

    def all(self) -> dict[str, Tensor]:
        """Those, and all that the state dict has: of a rank whose buffers are its own."""
        outside = unsaved_buffers(self._module)
        saved = {name: b.detach() for name, b in self._module.named_buffers() if name not in outside}
        return saved | self.unsaved()


def _remembered(buffer: Tensor) -> Any:
    # What is not dense cannot be saved: a change of it must be seen, and costs no copy.
    return buffer.detach().clone() if buffer.layout == torch.strided else (id(buffer), buffer._version)


def _is_same(before: Any, buffer: Tensor) -> bool:
    if not isinstance(before, Tensor):
        return bool(before == (id(buffer), buffer._version))
    return buffer.layout == torch.strided and same_bits(before, buffer)
