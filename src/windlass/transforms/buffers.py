"""Running statistics and other buffers, which the forwards of each rank change."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger
from windlass.core.module_state import extra_states, longest_rows, set_state, unsaved_buffers
from windlass.core.tensors import bits_of, distinct, same_bits
from windlass.core.types import State
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded

_log = get_job_logger(__name__)

# Dtypes that every backend can send.
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
        not inner_tensors(tensor)
        and tensor.dtype in _SENT
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and distinct(tensor).shape == tensor.shape
    )


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor is made of, such as a quantized one of torchao; none of an ordinary or sharded one."""
    made: Any = tensor
    if not hasattr(made, "__tensor_flatten__") or is_sharded(tensor):
        return []
    return [getattr(made, name) for name in made.__tensor_flatten__()[0]]


def broadcast(tensors: Iterable[Tensor], gang: Gang, source: int = 0) -> None:
    """Send the values of rank `source` of a gang to the others, in place, as `broadcast_in` does. Collective."""
    if gang.size == 1:
        return
    for tensor in tensors:
        # NCCL cannot send what is in host memory, as offloaded parameters are.
        group = gang.host_group if tensor.is_cpu else gang.device_group
        broadcast_in([tensor], group, gang.members[source])


def broadcast_in(tensors: Iterable[Tensor], group: Any, source: int) -> None:
    """Send the values of a rank to all ranks of a group, in place, for tensors of any dtype and strides, and for those
    that are made of others. Sparse ones are skipped (see `check_sparse`). Collective.

    Args:
        group: a process group; None is the default one, of all ranks.
        source: the rank in the job.
    """
    with torch.no_grad():
        for tensor in tensors:
            if inner := inner_tensors(tensor):
                broadcast_in(inner, group, source)
                continue
            if tensor.layout != torch.strided:
                continue
            # An expanded tensor has one element in memory for many, which is written once.
            own = distinct(tensor.detach())
            bits = bits_of(own)  # a dtype that the backend cannot send is sent as bytes
            if bits.numel():
                torch.distributed.broadcast(bits, source, group=group)
                if bits.data_ptr() != own.data_ptr():
                    own.copy_(bits.view(own.dtype).view(own.shape))


def check_sparse(module: nn.Module, loss_ranks: Gang) -> None:
    """Check that sparse tensors, which are not sent, are equal on all ranks. Collective if the module has any. Raises
    ModelError if one differs; it is named.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    digests = {name: digest_of(tensor) for name, tensor in named.items() if tensor.layout != torch.strided}
    if not digests:
        return
    found = loss_ranks.gather_objects(digests)
    other = sorted(name for name in digests if any(rank.get(name) != found[0].get(name) for rank in found))
    if other:
        raise ModelError(
            f"the sparse tensor {other[0]} differs between ranks, and cannot be sent: build it from the same values on "
            "every rank"
        )


def digest_of(tensor: Tensor) -> str:
    """A hash of the shape and the values of a tensor. Raises ModelError for a layout whose values are not known."""
    if tensor.layout == torch.strided:
        pieces = inner_tensors(tensor) or [tensor]
    elif tensor.layout == torch.sparse_coo:
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
        digest.update(bits_of(piece).cpu().numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def shared_buffers(module: nn.Module, share: Callable[[], None]) -> Iterator[None]:
    """Context in which all ranks have the buffers that `share` sends, which are saved. Collective.

    The buffers of each rank follow its own data until the next forward. Without this, ranks would evaluate different
    models, and only rank 0 the one in the checkpoint.
    """
    buffers = _dense(module)
    own = [buffer.detach().clone() for buffer in buffers]
    share()
    try:
        yield
    finally:
        restore(buffers, own)


def _dense(module: nn.Module) -> list[Tensor]:
    """The buffers without sparse ones, which must be constant: a checkpoint refuses one that changed."""
    return [buffer for buffer in module.buffers() if buffer.layout == torch.strided]


def restore(buffers: Iterable[Tensor], saved: Iterable[Tensor]) -> None:
    """Copy saved values into buffers, in place."""
    with torch.no_grad():
        for buffer, value in zip(buffers, saved, strict=True):
            distinct(buffer).copy_(distinct(value, buffer))


class ForwardState:
    """Copies of the buffers and extra states of a module, which forwards change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: list[Tensor] = []
        self.take()

    def take(self) -> None:
        """Copy the current values, reusing the memory of earlier copies."""
        live = _dense(self._module)
        if [kept.shape for kept in self._buffers] != [buffer.shape for buffer in live]:
            self._buffers = [buffer.detach().clone() for buffer in live]
        else:
            for kept, buffer in zip(self._buffers, live, strict=True):
                kept.copy_(buffer.detach())
        self._extra = copy.deepcopy({**extra_states(self._module), **longest_rows(self._module)})

    def restore(self) -> None:
        """Restore the copies. Can be called again."""
        restore(_dense(self._module), self._buffers)
        if self._extra:
            set_state(self._module, copy.deepcopy(self._extra))


# Of each module the buffers that its state dict leaves out, as they were before its first run: a script that trains
# again passes the module as the first run left it.
_as_built: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class OwnState:
    """The state of a model that a checkpoint has for each rank, beside the state dict: buffers and extra states.

    Buffers that the state dict leaves out are saved if they changed since the first run of the module: many are
    constants, which every process computes itself.

    Attributes:
        differs: ranks have other buffers than rank 0, so those of the state dict are saved too.
    """

    def __init__(self, module: nn.Module, differs: bool) -> None:
        self._module, self.differs = module, differs
        before = _as_built.get(module)
        # Without values as long as the module is on the meta device, where one waits for the weights of another rank.
        if before is None or any(isinstance(kept, Tensor) and kept.is_meta for kept in before.values()):
            before = {name: _remembered(buffer) for name, buffer in unsaved_buffers(module).items()}
            _as_built[module] = before
        self._before = before

    def state_dict(self) -> State:
        """The state of this rank, by name."""
        outside = unsaved_buffers(self._module)
        inside = self._module.named_buffers() if self.differs else ()
        return {
            **{name: buffer.detach() for name, buffer in inside if name not in outside},
            **{
                name: buffer.detach()
                for name, buffer in outside.items()
                if not _is_same(self._before.get(name), buffer)
            },
            **extra_states(self._module),
            **longest_rows(self._module),
        }

    def load_state_dict(self, state: State) -> None:
        # What was not saved had not changed then, and may have since, if a run goes back.
        live = unsaved_buffers(self._module)
        unchanged = {
            name: value
            for name, value in self._before.items()
            if isinstance(value, Tensor) and name in live and live[name].dtype == value.dtype
        }
        set_state(self._module, {**unchanged, **state})

    def adopt(self, states: Sequence[State]) -> None:
        """Restore the states of another number of ranks: all take rank 0's, of which the state dict has the rest. A
        warning names what further ranks had.
        """
        outside = {**unsaved_buffers(self._module), **longest_rows(self._module)}
        self.load_state_dict({name: value for name, value in states[0].items() if name in outside})
        names = dict.fromkeys(name for state in states[1:] for name in state)
        if names:
            _log.warning(
                "%d process(es) saved buffers or states of their own, and their number has changed: those of rank 0 "
                "are used, those of %d further rank(s) are dropped: %s",
                len(states),
                len(states) - 1,
                ", ".join(names),
            )


def _remembered(buffer: Tensor) -> Any:
    # A sparse buffer cannot be saved, so only a change must be detected, which needs no copy.
    return buffer.detach().clone() if buffer.layout == torch.strided else (id(buffer), buffer._version)


def _is_same(before: Any, buffer: Tensor) -> bool:
    if not isinstance(before, Tensor):
        return bool(before == (id(buffer), buffer._version))
    return buffer.layout == torch.strided and same_bits(before, buffer)
