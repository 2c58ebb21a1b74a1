"""Device maps: which module of a model lies on which accelerator, on the host or on disk.

A map goes from module names to places: the number of an accelerator, a torch device, `"cpu"` or `"disk"`. A name stands
for all that is in the module; `""` is the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.transforms.module_sizes import children_of
from windlass.transforms.module_tensors import Place

DeviceMap = Mapping[str, Place]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_logger = get_logger(__name__)


def check_and_set_device_map(device_map: Place | DeviceMap | None) -> DeviceMap | str | None:
    """A `device_map` argument in one form: a map, the name of a strategy (`"auto"`, ...) or None.

    Raises:
        ConfigError: neither a device nor a strategy.
    """
    if device_map is None or isinstance(device_map, Mapping) or device_map in STRATEGIES:
        return device_map
    if isinstance(device_map, int) and device_map < 0:
        raise ConfigError(Problem("device_map", device_map, "devices are numbered from 0; the host is 'cpu'"))
    if device_map == "cuda":
        return {"": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}
    if isinstance(device_map, int | torch.device):
        return {"": device_map}
    try:
        return {"": torch.device(device_map)}
    except RuntimeError:
        fix = f"give a device such as 'cpu' or 'cuda:0', a map, or one of {', '.join(STRATEGIES)}"
        raise ConfigError(Problem("device_map", device_map, fix)) from None


def lookup(device_map: DeviceMap, name: str) -> Place | None:
    """Where the map puts a module or tensor: the entry of the innermost module around it, or None."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def expand_device_map(device_map: DeviceMap | None, param_names: Iterable[str]) -> dict[str, Place]:
    """The place of each tensor by name; what the map does not cover goes to the host."""
    places = {name: lookup(device_map or {}, name) for name in param_names}
    return {name: "cpu" if place is None else place for name, place in places.items()}


def get_device(device_map: DeviceMap | None, param_name: str, valid_torch_device: bool = False) -> Place:
    """The place of one tensor. With `valid_torch_device`, `"cpu"` stands for the disk."""
    place = expand_device_map(device_map, [param_name])[param_name]
    return "cpu" if valid_torch_device and place == "disk" else place


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a map covers all of a model's parameters and persistent buffers.

    Raises:
        ConfigError: some have no place; they are named.
    """
    names = [name for name, _ in model.state_dict().items()]
    known = {"", *names, *(name for name, _ in model.named_modules())}
    strangers = [key for key in device_map if key not in known]
    if strangers:
        _logger.warning("device_map names what the model does not have: %s", ", ".join(strangers))
    uncovered = [name for name in names if lookup(device_map, name) is None]
    if uncovered:
        fix = f"gives no place for {', '.join(uncovered)}; add them, or '' for all the rest"
        raise ConfigError(Problem("device_map", dict(device_map), fix))


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: DeviceMap) -> None:
    """Warn of tied parameters that a map puts on different devices: each device would hold a copy of its own.

    Raises:
        ConfigError: the map gives no place for one of them.
    """
    for group in tied_params:
        places = {name: lookup(device_map, name) for name in group}
        if missing := [name for name, place in places.items() if place is None]:
            fix = f"gives no place for {', '.join(missing)}"
            raise ConfigError(Problem("device_map", dict(device_map), fix))
        if len(set(places.values())) > 1:
            _logger.warning("tied parameters are on different devices: %s; each gets a copy", places)


def clean_device_map(device_map: dict[str, Place], module_name: str = "") -> dict[str, Place]:
    """Replace, in place, the entries of a module by one where they all name the same device."""
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
    """The same map with no entry inside another: `{"": 0, "head": "cpu"}` names the other children instead of `""`."""
    known = [name for name in device_map if name == "" or _has(model, name)]
    flat: dict[str, Place] = {}
    for name in known:
        _flatten(name, model, device_map, known, flat)
    return flat


def _has(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(owner), last)
    except AttributeError:
        return False


def _flatten(
    name: str, model: nn.Module, device_map: DeviceMap, known: list[str], flat: dict[str, Place]
) -> None:
    prefix = f"{name}." if name else ""
    if not any(key.startswith(prefix) and key != name for key in known):
        place = lookup(device_map, name)
        assert place is not None
        flat[name] = place
        return
    module = model.get_submodule(name)
    parts = [*children_of(name, module), *((prefix + n, b) for n, b in module.named_buffers(recurse=False))]
    for child, _ in parts:
        if child not in known:
            _flatten(child, model, device_map, known, flat)
