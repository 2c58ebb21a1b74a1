"""How much of a model each device may take: what is free, and an even share of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.transforms.module_sizes import compute_module_sizes, convert_file_size_to_int, get_module_leaves

Room = dict[int | str, int]
"""Bytes by device: the number of an accelerator, `"mps"`, `"cpu"` or `"disk"`."""

USED_OF_ONLY_DEVICE = 0.9  # the rest is for activations, where nobody said how much may be taken
SLACK = 1.25  # layers do not fill a device to the last byte
_logger = get_logger(__name__)


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> Room:
    """Bytes that may be used on each device, accelerators first.

    Args:
        max_memory: sizes such as `{0: "10GB", "cpu": "30GB"}`. Without it: what is free on each accelerator, and the
            memory that the system says is available.

    Raises:
        ConfigError: an unknown device, or something that is not a size; all of them at once.
    """
    if max_memory is None:
        return _free_memory()
    problems = [
        Problem("max_memory", key, "name devices by the number of an accelerator, 'mps', 'cpu' or 'disk'")
        for key in max_memory
        if not isinstance(key, int) and key not in ("mps", "cpu", "disk")
    ]
    if problems:
        raise ConfigError(problems)
    numbers = sorted(key for key in max_memory if isinstance(key, int))
    absent = [number for number in numbers if not 0 <= number < visible_devices()]
    if absent:
        _logger.warning("max_memory names devices %s; there are %d here", absent, visible_devices())
    order = [*numbers, *(name for name in ("mps", "cpu", "disk") if name in max_memory)]
    return {key: convert_file_size_to_int(max_memory[key]) for key in order}


def _free_memory() -> Room:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "mps":
        return {
            "mps": available_host_memory()
        }  # one memory for both: counting it twice would promise too much
    room: Room = {}
    for index in range(visible_devices()):
        free, _ = torch.accelerator.get_memory_info(index)
        room[index] = free
    return {**room, "cpu": available_host_memory()}


def available_host_memory() -> int:
    """Bytes of host memory that can be taken without swapping.

    Raises:
        ConfigError: the system does not tell.
    """
    if sys.platform == "linux":
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        fix = "this system does not say how much memory is available: give it, e.g. {'cpu': '16GB'}"
        raise ConfigError(Problem("max_memory", None, fix)) from None


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> Room:
    """`max_memory` for `infer_auto_device_map` under which accelerators are filled evenly.

    Each but the last is limited to an even share, plus slack for a block that does not fit exactly.

    Args:
        low_zero: keep device 0 as empty as the others allow, e.g. for `generate`.
    """
    room = get_max_memory(max_memory)
    devices = [key for key in room if key not in ("cpu", "disk") and room[key] > 0]
    if not devices:
        return room
    if len(devices) == 1:
        low_zero = False
        if max_memory is None and isinstance(devices[0], int):
            room[devices[0]] = int(room[devices[0]] * USED_OF_ONLY_DEVICE)
            _logger.info("90 %% of device %s may hold the model; say max_memory for more", devices[0])
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes.get("", 0) // (len(devices) - 1 if low_zero else len(devices))
    share += int(
        SLACK * max(_largest_block(model, sizes, class_names(no_split_module_classes)), _mean_layer(sizes))
    )
    numbers = sorted(key for key in devices if isinstance(key, int))
    for index in numbers[:-1]:  # the last keeps all it has, should the slack be too small
        room[index] = min(room[0] if low_zero and index == 0 else share, room[index])
    if low_zero:
        others = sum(room[index] for index in range(1, len(devices)))
        room[0] = min(max(0, sizes.get("", 0) - others), room[0])
    return room


def class_names(names: Sequence[str] | str | None) -> list[str]:
    """Class names as a list, whichever way they were given."""
    return [names] if isinstance(names, str) else list(names or [])


def _largest_block(model: nn.Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    """The largest of the blocks that must stay whole: one per class, the first of its kind."""
    first: dict[str, int] = {}
    for name, module in model.named_modules():
        if name and type(module).__name__ in no_split:
            first.setdefault(type(module).__name__, sizes.get(name, 0))
    return max(first.values(), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    return int(sum(modules[name] for name in layers) / max(len(layers), 1))
