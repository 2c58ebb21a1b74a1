"""A device map found by filling the devices in order: accelerators, then the host, then the disk.

The rules (and so the maps) are those of accelerate's `infer_auto_device_map`. The first accelerator and the host keep
room for the largest layer that is still to come, because an offloaded layer is brought there to be run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from windlass.compat.device_map import clean_device_map, lookup
from windlass.compat.device_memory import Room, class_names, get_max_memory
from windlass.compat.ties import find_tied_parameters
from windlass.core.logs import get_logger
from windlass.core.output import say
from windlass.transforms.module_sizes import (
    NamedModule,
    children_of,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    top_level,
)
from windlass.transforms.module_tensors import Place

_logger = get_logger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """A device map for `model` that no device's memory is exceeded by. The model may be on the meta device.

    Args:
        max_memory: bytes by device (see `get_max_memory`); what fits nowhere goes to disk.
        no_split_module_classes: classes whose modules stay whole, such as blocks with a residual connection.
        dtype, special_dtypes: what the weights will be cast to (see `compute_module_sizes`).
        verbose: print each decision.
        clean_result: name a module instead of its parts where they all go to one device.
        offload_buffers: buffers of offloaded layers are offloaded as well, and need no room on an accelerator.
        fallback_allocation: where the next layer does not fit on an empty device, look for one further on that does.
    """
    room = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    filling = _Filling(
        room,
        sizes,
        find_tied_parameters(model),
        class_names(no_split_module_classes),
        verbose,
        fallback_allocation,
    )
    filling.start(top_level(model))
    while filling.waiting:
        filling.place_next()
    filling.place_buffers_of_split_modules(model)
    if not offload_buffers:
        _check_buffers(model, filling, dtype, special_dtypes)
    if filling.too_small:
        needed = ", ".join(f"{device}: {size:,} bytes" for device, size in filling.too_small.items())
        _logger.info("these devices got nothing; the least they would need for the next layer is %s", needed)
    found: dict[str, Place] = dict(filling.found)
    return clean_device_map(found) if clean_result else found


@dataclass
class _Item:
    """The module in hand: its bytes alone, its bytes with the modules tied to it, and those modules."""

    name: str
    module: nn.Module | Tensor
    size: int
    with_ties: int
    tied: list[NamedModule]


@dataclass
class _Filling:
    """The devices as they fill up, and what is still waiting for a place."""

    room: Room
    sizes: dict[str, int]
    ties: list[list[str]]
    no_split: list[str]
    verbose: bool
    fallback: bool
    found: dict[str, int | str] = field(default_factory=dict)
    waiting: list[NamedModule] = field(default_factory=list)
    too_small: dict[int | str, int] = field(default_factory=dict)
    placed_modules: list[tuple[int | str, nn.Module]] = field(default_factory=list)

    def start(self, parts: list[NamedModule]) -> None:
        self.waiting = parts
        self._devices = [*self.room, *([] if "disk" in self.room else ["disk"])]
        self.used: dict[int | str, int] = dict.fromkeys(self._devices, 0)  # what is reserved counts as well
        self._taken = dict(self.used)
        self._device = self._devices[0]
        self.accelerators = [device for device in self._devices if device not in ("cpu", "disk")]
        # Where an offloaded layer is brought to, and so where the largest of them must still find room.
        self._reserving: list[int | str] = [*self.accelerators[:1], "cpu"]
        if "mps" in self.accelerators:
            self._reserving = ["mps"]
        self._largest, self._largest_names = get_max_layer_size(parts, self.sizes, self.no_split)

    def place_next(self) -> None:
        """Put the next module on the current device, or split it, or go on to the next device."""
        name, module = self.waiting.pop(0)
        self._forget_largest(name)
        item = self._with_ties(name, module, self.waiting)
        limit = self._limit()
        if limit is None or self.used[self._device] + item.with_ties <= limit:
            self._put(item)
            return
        free = limit - self.used[self._device]
        if item.tied and item.size <= free and self._split_a_tied_one(item):
            return
        if item.size >= free and self._split(item):
            return
        if not self._find_smaller(item):
            self._next_device(item)

    def place_buffers_of_split_modules(self, model: nn.Module) -> None:
        """Put what was left over when modules were split: beside the other parts if there is room, else further on."""
        for name, _ in model.named_buffers():
            if lookup(self.found, name) is not None:
                continue
            beside = [
                place for other, place in self.found.items() if other.startswith(name.rpartition(".")[0])
            ]
            size = self.sizes.get(name, 0)
            for device in dict.fromkeys([*beside, *self._devices]):
                if device == "disk" or self._taken[device] + size <= self.room[device]:
                    self.found[name] = device
                    self._taken[device] += size
                    break

    def _limit(self) -> int | None:
        """Bytes that the current device may hold in all; None for the disk."""
        return None if self._device == "disk" else self.room[self._device] - self._reserved()

    def _reserved(self) -> int:
        return self._largest if self._device in self._reserving else 0

    def _forget_largest(self, name: str) -> None:
        self._largest_names = [
            other for other in self._largest_names if other != name and not other.startswith(f"{name}.")
        ]
        if not self._largest_names:
            self._measure_largest()

    def _measure_largest(self) -> None:
        modules = [(name, module) for name, module in self.waiting if isinstance(module, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def _with_ties(self, name: str, module: nn.Module | Tensor, others: Sequence[NamedModule]) -> _Item:
        tied = tied_outside(name, self.ties)
        size = self.sizes.get(name, 0)
        with_ties, names, modules = get_module_size_with_ties(tied, size, self.sizes, others)
        return _Item(name, module, size, with_ties, list(zip(names, modules, strict=True)))

    def _put(self, item: _Item) -> None:
        self._say(f"{item.name} ({item.with_ties:,} bytes) goes to {self._device}")
        self.used[self._device] += item.with_ties
        self._taken[self._device] += item.with_ties
        self.found[item.name] = self._device
        tied = {name for name, _ in item.tied}
        self.found.update(dict.fromkeys([name for name, _ in item.tied], self._device))
        self.waiting = [(name, module) for name, module in self.waiting if name not in tied]
        if isinstance(item.module, nn.Module):
            self.placed_modules.append((self._device, item.module))

    def _split_a_tied_one(self, item: _Item) -> bool:
        for name, module in item.tied:
            if not self._can_split(module):
                continue
            self._say(f"{item.name} fits on {self._device} without {name}, which is split")
            index = [other for other, _ in self.waiting].index(name)
            parts = children_of(name, module)
            before, after = self.waiting[:index], self.waiting[index + 1 :]
            self.waiting = [(item.name, item.module), *before, *parts, *after]
            self._measure_largest()
            return True
        return False

    def _split(self, item: _Item) -> bool:
        if not self._can_split(item.module):
            return False
        self._say(f"{item.name} ({item.size:,} bytes) does not fit on {self._device} and is split")
        self.waiting = children_of(item.name, item.module) + self.waiting
        self._measure_largest()
        return True

    def _can_split(self, module: nn.Module | Tensor) -> bool:
        has_children = isinstance(module, nn.Module) and any(True for _ in module.children())
        return has_children and type(module).__name__ not in self.no_split

    def _find_smaller(self, item: _Item) -> bool:
        """On a device that is still empty, bring something forward that fits. Only where it was asked for."""
        if self.used[self._device] or not self.fallback or self._device == "disk":
            return False
        limit = self.room[self._device] - max(self._largest, item.with_ties)
        name = self._first_that_fits(limit)
        if name is None:
            return False
        self._unpack(name)
        index = [other for other, _ in self.waiting].index(name)
        chosen = self.waiting.pop(index)
        self.waiting = [chosen, (item.name, item.module), *self.waiting]
        return True

    def _first_that_fits(self, limit: int) -> str | None:
        search = list(self.waiting)
        while search:
            name, module = search.pop(0)
            if self._with_ties(name, module, search).with_ties <= limit:
                return name
            if self._can_split(module):
                search = children_of(name, module) + search
        return None

    def _unpack(self, name: str) -> None:
        """Replace waiting modules by their parts until `name` itself is waiting."""
        parts = name.split(".")
        for depth in range(1, len(parts)):
            outer = ".".join(parts[:depth])
            names = [other for other, _ in self.waiting]
            if outer in names:
                index = names.index(outer)
                inner = children_of(outer, self.waiting[index][1])
                self.waiting = self.waiting[:index] + inner + self.waiting[index + 1 :]

    def _next_device(self, item: _Item) -> None:
        self._say(f"{item.name} does not fit on {self._device} and cannot be split: on to the next device")
        if self.used[self._device] == 0:
            self.too_small[self._device] = item.with_ties + self._reserved()
        self.used[self._device] += self._reserved()
        self._device = self._devices[self._devices.index(self._device) + 1]
        self.waiting = [(item.name, item.module), *self.waiting]

    def _say(self, text: str) -> None:
        if self.verbose:
            say(text)


def tied_outside(name: str, ties: Sequence[Sequence[str]]) -> list[str]:
    """Parameters outside module `name` that are tied to one inside it."""
    inside = [[f"{param}.".startswith(f"{name}.") for param in group] for group in ties]
    return [
        param
        for group, within in zip(ties, inside, strict=True)
        if any(within) and not all(within)
        for param, is_inside in zip(group, within, strict=True)
        if not is_inside
    ]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[NamedModule],
) -> tuple[int, list[str], list[nn.Module | Tensor]]:
    """Bytes of a module and of those in `modules_to_treat` that hold parameters tied to it, and these modules.

    The shared parameters themselves count once.
    """
    holders: dict[str, nn.Module | Tensor] = {}
    for param in tied_params:
        holder = next((pair for pair in modules_to_treat if f"{param}.".startswith(f"{pair[0]}.")), None)
        if holder is not None:
            holders[holder[0]] = holder[1]
            module_size -= module_sizes.get(param, 0)
    total = module_size + sum(module_sizes.get(name, 0) for name in holders)
    return total, list(holders), list(holders.values())


def _check_buffers(
    model: nn.Module,
    filling: _Filling,
    dtype: str | torch.dtype | None,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
) -> None:
    """Warn where no accelerator has room for the buffers of offloaded layers, which stay on one."""
    offloaded = sum(
        compute_module_total_buffer_size(module, dtype, special_dtypes)
        for device, module in filling.placed_modules
        if device in ("cpu", "disk")
    )
    fits = any(filling.room[device] >= offloaded + filling.used[device] for device in filling.accelerators)
    if offloaded and filling.accelerators and not fits:
        _logger.warning(
            "the buffers of offloaded layers take %d bytes and fit on no accelerator; say offload_buffers=True",
            offloaded,
        )
