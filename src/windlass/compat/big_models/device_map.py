"""Device maps: on which accelerator, or on the host or the disk, each module of a model is.

A map goes from module names to places: the index of an accelerator, a torch device, `"cpu"` or `"disk"`. An entry
applies to the whole module of that name; `""` is the whole model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from windlass.compat.big_models.device_memory import children_of
from windlass.compat.big_models.module_tensors import Place
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger

DeviceMap = Mapping[str, Place]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_logger = get_logger(__name__)


def check_and_set_device_map(device_map: Place | DeviceMap | None) -> DeviceMap | str | None:
    """Normalize a `device_map` argument to a map, the name of a strategy (`"auto"`, ...) or None."""
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
    """The place of a module or tensor: the entry of the innermost module that contains it, or None."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def expand_device_map(device_map: DeviceMap | None, param_names: Iterable[str]) -> dict[str, Place]:
    """The place of each tensor by name; a tensor that the map does not cover is on the host."""
    places = {name: lookup(device_map or {}, name) for name in param_names}
    return {name: "cpu" if place is None else place for name, place in places.items()}


def get_device(device_map: DeviceMap | None, param_name: str, valid_torch_device: bool = False) -> Place:
    """The place of one tensor. With `valid_torch_device`, `"disk"` is replaced by `"cpu"`."""
    place = expand_device_map(device_map, [param_name])[param_name]
    return "cpu" if valid_torch_device and place == "disk" else place


def _refuse_uncovered(device_map: DeviceMap, names: Iterable[str]) -> None:
    if uncovered := [name for name in names if lookup(device_map, name) is None]:
        fix = f"gives no place for {', '.join(uncovered)}; add them, or '' for all other modules"
        raise ConfigError(Problem("device_map", dict(device_map), fix))


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a map covers all parameters and persistent buffers of a model. Raises ConfigError if some are not
    covered; they are named.
    """
    names = list(model.state_dict())
    known = {"", *names, *(name for name, _ in model.named_modules())}
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
