"""Infer a device map by filling devices in order: accelerators, then the host, then the disk.

The rules (and so the maps) are those of accelerate's `infer_auto_device_map`. The first accelerator and the host keep
room for the largest layer that is not placed yet, because an offloaded layer is loaded there to run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.compat.big_models.device_memory import (
    Dtype,
    Limits,
    NamedModule,
    Room,
    children_of,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_max_memory,
    top_level,
)
from windlass.compat.big_models.module_tensors import Place, find_tied_parameters
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.output import say

# Device maps: on which accelerator, or on the host or the disk, each module of a model is.
#
# A map goes from module names to places: the index of an accelerator, a torch device, `"cpu"` or `"disk"`. An entry
# applies to the whole module of that name; `""` is the whole model.

DeviceMap = Mapping[str, Place]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def check_and_set_device_map(device_map: Place | DeviceMap | None) -> DeviceMap | str | None:
    """Normalize a `device_map` argument to a map, the name of a strategy (`"auto"`, ...) or None."""
    if device_map is None or isinstance(device_map, Mapping) or device_map in STRATEGIES:
        return device_map
    if isinstance(device_map, int) and device_map < 0:
        raise ConfigError(Problem("device_map", device_map, "devices are numbered from 0; the host is 'cpu'"))
    # As transformers: each process loads onto the accelerator of its local rank.
    if device_map == "cuda":
        return {"": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}
    if isinstance(device_map, int | torch.device):
        return {"": device_map}
    try:
        return {"": torch.device(device_map)}
    except (RuntimeError, TypeError):
        fix = f"give a device such as 'cpu' or 'cuda:0', a map, or one of {', '.join(STRATEGIES)}"
        raise ConfigError(Problem("device_map", device_map, fix)) from None


def places_of(device_map: DeviceMap) -> list[Place]:
    """The different places of a map, in order. Raises ConfigError for one that is not a device, or that this process
    does not see; they are named.
    """
    places = list(dict.fromkeys(device_map.values()))
    if absent := [place for place in places if not _is_there(place)]:
        seen = visible_devices()
        fix = f"names devices {absent}, and {seen} accelerators are visible, by their numbers from 0; others are 'cpu' "
        raise ConfigError(Problem("device_map", dict(device_map), f"{fix}and 'disk'"))
    return places


def _is_there(place: Place) -> bool:
    if isinstance(place, int):
        return 0 <= place < visible_devices()
    try:
        device = torch.device("cpu" if place == "disk" else place)
    except (RuntimeError, TypeError):
        return False
    # PyTorch does not count the devices of XLA.
    if device.type in ("cpu", "meta", "xla"):
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_type = accelerator is not None and accelerator.type == device.type
    return is_type and (device.index or 0) < visible_devices()


def lookup(device_map: DeviceMap, name: str) -> Place | None:
    """The place of a module or tensor: the entry of the innermost module that contains it, or None."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def _refuse_uncovered(device_map: DeviceMap, names: Iterable[str]) -> None:
    if uncovered := [name for name in names if lookup(device_map, name) is None]:
        fix = f"gives no place for {', '.join(uncovered)}; add them, or '' for all other modules"
        raise ConfigError(Problem("device_map", dict(device_map), fix))


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a map covers all parameters and persistent buffers of a model. Raises ConfigError if some are not
    covered; they are named.
    """
    names = list(model.state_dict())
    # A shared module has several names; and the state dict lacks some buffers.
    parts = [*model.named_modules(remove_duplicate=False), *model.named_buffers()]
    known = {"", *names, *(name for name, _ in parts)}
    if unknown := [key for key in device_map if key not in known]:
        text = f"device_map names modules that the model does not have: {', '.join(unknown)}"
        warnings.warn(text, stacklevel=2)
    _refuse_uncovered(device_map, names)


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: DeviceMap) -> None:
    """Log a warning for tied parameters on different devices, because each device would hold its own copy. Raises
    ConfigError if the map does not cover one of them.
    """
    for group in tied_params:
        _refuse_uncovered(device_map, group)
        places = {name: lookup(device_map, name) for name in group}
        if len(set(places.values())) > 1:
            _logger.warning("tied parameters are on different devices: %s; each gets a copy", places)


def clean_device_map(device_map: dict[str, Place], module_name: str = "") -> dict[str, Place]:
    """In place, replace the entries of a module by a single one if they all name the same device."""
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    places = [device_map[name] for name in inside]
    if len(places) > 1 and len(set(places)) == 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = places[0]
    depth = module_name.count(".") + 2 if module_name else 1
    deeper = [name for name in device_map if name.startswith(prefix) and len(name) > len(module_name)]
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in deeper):
        clean_device_map(device_map, child)
    return device_map


def without_nesting(model: nn.Module, device_map: DeviceMap) -> dict[str, Place]:
    """The same map without entries inside others: `{"": 0, "head": "cpu"}` names the other children instead of `""`."""
    flat: dict[str, Place] = {}

    def flatten(name: str, module: nn.Module | torch.Tensor) -> None:
        prefix = f"{name}." if name else ""
        place = lookup(device_map, name)
        if place is not None and not any(key.startswith(prefix) and key != name for key in device_map):
            flat[name] = place
        elif isinstance(module, nn.Module):
            for child, part in children_of(name, module):
                flatten(child, part)
            for buffer, part in module.named_buffers(recurse=False):
                flatten(prefix + buffer, part)

    flatten("", model)
    return flat


_logger = get_logger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Limits | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """A device map for `model` that exceeds no device's memory. The model may be on the meta device.

    Args:
        max_memory: bytes by device (see `get_max_memory`); what does not fit goes to disk.
        no_split_module_classes: classes whose modules are not split, such as blocks with a residual connection.
        dtype: the dtype that weights will be cast to (see `compute_module_sizes`).
        special_dtypes: other dtypes by the names of weights.
        verbose: print each decision.
        clean_result: name a module instead of its parts if they are all on one device.
        offload_buffers: buffers of offloaded layers are offloaded too, and need no room on an accelerator.
        fallback_allocation: if the next layer does not fit on an empty device, look for a later one that does.
    """
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    no_split = class_names(no_split_module_classes)
    filling = _Filling(model, get_max_memory(max_memory), sizes, no_split, verbose, fallback_allocation)
    while filling.waiting:
        filling.place_next()
    filling.place_buffers_of_split_modules(model)
    if not offload_buffers:
        offloaded = sum(
            compute_module_total_buffer_size(module, dtype, special_dtypes)
            for device, module in filling.placed_modules
            if device in ("cpu", "disk")
        )
        filling.check_room_for_buffers(offloaded)
    if filling.too_small:
        needed = ", ".join(f"{device}: {size:,} bytes" for device, size in filling.too_small.items())
        _logger.info("these devices got no module; the next one would have needed %s", needed)
    found: dict[str, Place] = dict(filling.found)
    return clean_device_map(found) if clean_result else found


@dataclass
class _Item:
    """The module to place: its bytes, its bytes with the modules tied to it, and those modules."""

    name: str
    module: nn.Module | Tensor
    size: int
    with_ties: int
    tied: list[NamedModule]


class _Filling:
    """The bytes used on each device, and the modules that are not placed yet."""

    def __init__(
        self,
        model: nn.Module,
        room: Room,
        sizes: dict[str, int],
        no_split: list[str],
        verbose: bool,
        fallback: bool,
    ) -> None:
        self.waiting, self._ties = top_level(model), find_tied_parameters(model)
        self._room, self._sizes, self._no_split = room, sizes, no_split
        self._verbose, self._fallback = verbose, fallback
        self.found: dict[str, int | str] = {}
        self.too_small: dict[int | str, int] = {}
        self.placed_modules: list[tuple[int | str, nn.Module]] = []
        self._devices = [*room, *([] if "disk" in room else ["disk"])]
        self._used: dict[int | str, int] = dict.fromkeys(self._devices, 0)  # including what is reserved
        self._taken = dict(self._used)
        self._device = self._devices[0]
        self._accelerators = [device for device in self._devices if device not in ("cpu", "disk")]
        # Offloaded layers run there, so the largest of them must still fit.
        reserving: list[int | str] = [*self._accelerators[:1], "cpu"]
        # MPS and the host are one memory, and only "mps" is listed.
        self._reserving = ["mps"] if "mps" in self._accelerators else reserving
        self._largest, self._largest_names = get_max_layer_size(self.waiting, sizes, no_split)

    def place_next(self) -> None:
        """Put the next module on the current device, or split it, or continue with the next device."""
        name, module = self.waiting.pop(0)
        self._forget_largest(name)
        item = self._with_ties(name, module, self.waiting)
        if self._device == "disk":
            self._put(item)
            return
        free = self._room[self._device] - self._reserved() - self._used[self._device]
        if item.with_ties <= free:
            self._put(item)
            return
        # First what is tied to it: the module itself fits, and only together with the others it does not.
        split = bool(item.tied) and item.size <= free and self._split_a_tied_one(item)
        split = split or (item.size >= free and self._split(item))
        if not split and not self._find_smaller(item):
            self._next_device(item)

    def place_buffers_of_split_modules(self, model: nn.Module) -> None:
        """Put each remaining buffer on the device of the module's other parts if it fits, else on a later one."""
        for name, _ in model.named_buffers():
            if lookup(self.found, name) is not None:
                continue
            prefix = name[: name.rfind(".") + 1]  # with the dot: "layer10" is not a part of "layer1"
            beside = [place for other, place in self.found.items() if other.startswith(prefix)]
            size = self._sizes.get(name, 0)
            for device in dict.fromkeys([*beside, *self._devices]):
                if device == "disk" or self._taken[device] + size <= self._room[device]:
                    self.found[name] = device
                    self._taken[device] += size
                    break

    def check_room_for_buffers(self, offloaded: int) -> None:
        """Warn if no accelerator has room for `offloaded` bytes of buffers, which stay on one."""
        fits = any(self._room[device] >= offloaded + self._used[device] for device in self._accelerators)
        if offloaded and self._accelerators and not fits:
            warnings.warn(
                f"the buffers of offloaded layers take {offloaded} bytes and fit on no accelerator; "
                "set offload_buffers=True",
                stacklevel=3,
            )

    def _reserved(self) -> int:
        return self._largest if self._device in self._reserving else 0

    def _forget_largest(self, name: str) -> None:
        inside = f"{name}."
        self._largest_names = [
            other for other in self._largest_names if other != name and not other.startswith(inside)
        ]
        if not self._largest_names:
            self._measure_largest()

    def _measure_largest(self) -> None:
        modules = [(name, module) for name, module in self.waiting if isinstance(module, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self._sizes, self._no_split)

    def _with_ties(self, name: str, module: nn.Module | Tensor, others: Sequence[NamedModule]) -> _Item:
        size = self._sizes.get(name, 0)
        tied = tied_outside(name, self._ties)
        with_ties, names, modules = get_module_size_with_ties(tied, size, self._sizes, others)
        return _Item(name, module, size, with_ties, list(zip(names, modules, strict=True)))

    def _put(self, item: _Item) -> None:
        self._say(f"{item.name} ({item.with_ties:,} bytes) goes to {self._device}")
        self._used[self._device] += item.with_ties
        self._taken[self._device] += item.with_ties
        tied = dict(item.tied)
        self.found.update(dict.fromkeys([item.name, *tied], self._device))
        self.waiting = [(name, module) for name, module in self.waiting if name not in tied]
        if isinstance(item.module, nn.Module):
            self.placed_modules.append((self._device, item.module))

    def _split_a_tied_one(self, item: _Item) -> bool:
        for name, module in item.tied:
            if self._can_split(module):
                self._say(f"{item.name} fits on {self._device} without {name}, which is split")
                self._replace(name, children_of(name, module))
                self.waiting.insert(0, (item.name, item.module))
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
        return has_children and type(module).__name__ not in self._no_split

    def _index(self, name: str) -> int:
        return [other for other, _ in self.waiting].index(name)

    def _replace(self, name: str, parts: list[NamedModule]) -> None:
        index = self._index(name)
        self.waiting[index : index + 1] = parts

    def _find_smaller(self, item: _Item) -> bool:
        """With `fallback`, if the device is empty, move a module that fits to the front."""
        if self._used[self._device] or not self._fallback:
            return False
        limit = self._room[self._device] - max(self._largest, item.with_ties)
        name = self._first_that_fits(limit)
        if name is None:
            return False
        self._unpack(name)
        chosen = self.waiting.pop(self._index(name))
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
            if (module := dict(self.waiting).get(outer)) is not None:
                self._replace(outer, children_of(outer, module))

    def _next_device(self, item: _Item) -> None:
        self._say(f"{item.name} does not fit on {self._device} and cannot be split: on to the next device")
        if self._used[self._device] == 0:
            self.too_small[self._device] = item.with_ties + self._reserved()
        self._used[self._device] += self._reserved()
        self._device = self._devices[self._devices.index(self._device) + 1]
        self.waiting.insert(0, (item.name, item.module))

    def _say(self, text: str) -> None:
        if self._verbose:
            say(text)


def tied_outside(name: str, ties: Sequence[Sequence[str]]) -> list[str]:
    """Parameters outside module `name` that are tied to one inside it."""
    outside = []
    for group in ties:
        others = [param for param in group if not f"{param}.".startswith(f"{name}.")]
        if len(others) < len(group):
            outside += others
    return outside


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[NamedModule],
) -> tuple[int, list[str], list[nn.Module | Tensor]]:
    """Bytes of a module and of the modules that hold parameters tied to it (counted once), and these modules."""
    holders: dict[str, nn.Module | Tensor] = {}
    for param in tied_params:
        holder = next((pair for pair in modules_to_treat if f"{param}.".startswith(f"{pair[0]}.")), None)
        if holder is not None:
            holders[holder[0]] = holder[1]
            module_size -= module_sizes.get(param, 0)
    total = module_size + sum(module_sizes.get(name, 0) for name in holders)
    return total, list(holders), list(holders.values())
