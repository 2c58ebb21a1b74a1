"""Sending rank 0's weights to all ranks, unit by unit, so that no rank has more than one whole unit in memory.

Other ranks may have the module on the meta device: a machine then loads a large model with one copy in host memory. If
the first process of each machine has weights, each machine sends its own, as far as they equal rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.dist.views import overlapping
from windlass.transforms.buffers import broadcast, broadcast_in, digest_of
from windlass.transforms.few_bits import share_scales

# A table of a module's parameters or buffers, and a name in it.
_Slot = tuple[dict[str, Any], str]


def has_weights(module: nn.Module) -> bool:
    """Return True unless another rank has the weights of `module`, and sends them when it is sharded."""
    return not any(parameter.is_meta for parameter in module.parameters())


def to_meta(module: nn.Module) -> nn.Module:
    """Move every parameter and buffer to the meta device, in place; tied ones stay tied."""
    for places in _slots(module).values():
        table, name = places[0]
        _fill(places, _like(table[name], torch.device("meta")))
    return module


def check_same_structure(module: nn.Module, loss_ranks: Gang) -> None:
    """Check that all ranks have the same module: sharding different ones would wait forever. Raises ModelError if
    names, shapes, dtypes or ties of parameters or buffers differ; or if a trained parameter is a view of the memory of
    another parameter or a buffer.
    """
    seen: dict[int, int] = {}
    lines = [
        f"{name} {list(tensor.shape)} {tensor.dtype} {seen.setdefault(id(tensor), len(seen))}"
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_meta = any(tensor.is_meta for tensor in tensors.values())
    # Those that share memory and would not once they are sharded, if one of them is trained.
    shared = (names for names in overlapping(tensors) if any(tensors[name].requires_grad for name in names))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    found = loss_ranks.gather_objects([digest, on_meta, next(shared, [])])
    other = [str(rank) for rank, (digest, _, _) in enumerate(found) if digest != found[0][0]]
    if other:
        raise ModelError(
            f"the model of rank(s) {', '.join(other)} differs from rank 0's in the names, shapes, types or ties of its "
            "parameters or buffers; every rank must build the same model"
        )
    if found[0][1]:
        raise ModelError("rank 0's model is on the meta device: there are no weights for the ranks to take")
    torn = next((names for _, _, names in found if names), None)
    if torn:
        raise ModelError(
            f"{', '.join(torn)} are views of the same memory, and sharded each would have its own and be trained apart "
            "from the others: tie weights by assigning the same Parameter (head.weight = embed.weight), and compute "
            "other views of it in the forward"
        )


class FirstRank:
    """Moves tensors of a module onto a device, with the values of the first of `gang`, which have the same of them.
    `module` is the whole model; replaced tensors stay tied in it.

    Args:
        by_machine: the first process of each machine may have read the weights, for the others on it.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, gang: Gang, *, by_machine: bool = False
    ) -> None:
        self._device, self._ranks = device, gang
        self._alone = gang.size == 1
        self._slots = _slots(module)
        self._reads = has_weights(module)
        self._by_machine = by_machine and not self._alone and self._each_machine_reads()

    def place(self, tensors: Iterable[Tensor]) -> None:
        """Collective; in the same order on every rank."""
        placed = [self._on_device(tensor) for tensor in list(tensors)]
        if self._alone:
            return
        self._send(placed)
        for tensor in placed:
            self._send(share_scales(tensor, self._ranks))

    def _on_device(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            places, tensor = self._slots[id(tensor)], _like(tensor, self._device)
            _fill(places, tensor)
        elif tensor.layout == torch.strided:
            tensor.data = tensor.data.to(self._device).contiguous()
        else:
            tensor.data = tensor.data.to(self._device)
        return tensor

    def _each_machine_reads(self) -> bool:
        """True if of several machines the first process has weights, and no other one."""
        mine = [self._reads, self._ranks.world.rank, self._ranks.on_machine.start]
        found = self._ranks.gather_objects(mine)
        firsts = sorted({first for _, _, first in found})
        return len(firsts) > 1 and firsts == [rank for reads, rank, _ in found if reads]

    def _send(self, tensors: list[Tensor]) -> None:
        if not self._by_machine:
            broadcast(tensors, self._ranks)
            return
        digests = [digest_of(tensor) for tensor in tensors] if self._reads else None
        read = [found for found in self._ranks.gather_objects(digests) if found is not None]
        machine, first = self._ranks.machine_group(), self._ranks.on_machine.start
        for tensor, *of_machines in zip(tensors, *read, strict=True):
            if len(set(of_machines)) == 1:
                broadcast_in([tensor], machine, first)
            else:  # such as new weights, which each process drew for itself
                broadcast([tensor], self._ranks)


def _slots(module: nn.Module) -> dict[int, list[_Slot]]:
    """id of each parameter and buffer -> all tables and names that refer to it."""
    found: dict[int, list[_Slot]] = {}
    for member in module.modules():
        tables: tuple[dict[str, Any], ...] = (member._parameters, member._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((table, name))
    return found


def _fill(places: list[_Slot], tensor: Tensor) -> None:
    for table, name in places:
        table[name] = tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """An empty tensor like `tensor` on `device`; a parameter keeps its attributes."""
    empty = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    if not isinstance(tensor, nn.Parameter):
        return empty
    if type(tensor) is not nn.Parameter and issubclass(type(tensor), nn.Parameter):  # such as one of few bits
        parameter = empty.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    else:
        parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # What libraries note at a parameter, such as the scales of one of few bits.
    parameter.__dict__.update(tensor.__dict__)
    return parameter
