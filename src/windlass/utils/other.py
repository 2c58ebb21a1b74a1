"""Small functions of the old library: files of tensors, names, sizes, ports."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.value_files import load_values, on_this_machine, save_values
from windlass.checkpoint.files import Files
from windlass.compat.readers.torch_file import open_torch_file
from windlass.compat.state import PartialState
from windlass.core.device import visible_devices
from windlass.core.optional import require
from windlass.core.tensors import address
from windlass.core.trees import convert_to_fp32, send_to_device
from windlass.dist.sharded import is_sharded
from windlass.recipes.from_files import basic_settings, default_file, write_file


def model_has_dtensor(model: nn.Module) -> bool:
    """Return True if parameters of the model are sharded over processes."""
    return any(map(is_sharded, model.parameters()))


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the module and all its submodules, children before parents.

    Args:
        return_fqns: (name, module) pairs instead of modules.
    """
    ordered: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        ordered.append((name, module))
        stack.extend((f"{name}.{child}" if name else child, part) for child, part in module.named_children())
    ordered.reverse()
    return list(ordered) if return_fqns else [module for _, module in ordered]


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    PartialState().wait_for_everyone()


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write tensors and plain values, on the main process.

    Args:
        obj: for ".safetensors", a dict of tensors; else a nest of tensors and plain values.
        f: the file; its ending decides about the format, as for `Accelerator.save`.
        save_on_each_node: write on the main process of every machine.
        safe_serialization: write a safetensors file under any name.
    """
    path, state = on_this_machine(f), PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_values(path, obj, safe_serialization)


def load(f: str | os.PathLike[str], map_location: torch.device | str | None = None) -> Any:
    """Return what `save` wrote under this name, the tensors of a safetensors file, or the tensors and plain values of a
    file of `torch.save`. Nothing in it is executed. Raises CheckpointError for other files.

    Args:
        map_location: the device of the tensors; None is the host.
    """
    path = on_this_machine(f)
    if path.suffix not in (".safetensors", ".json") and path.exists():
        with open_torch_file(path, Files()) as file:
            found = file.materialised(file.tree)
    else:
        found = load_values(path)
    return found if map_location is None else send_to_device(found, map_location)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with contiguous tensors, and only the first of tensors that are the same view of memory."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        place = (address(tensor), tensor.dtype, tensor.shape, tensor.stride())
        # Tensors without elements all have the address 0.
        if not tensor.numel() or place not in seen:
            kept[name] = tensor.contiguous()
            seen.add(place)
    return kept


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a forward: converts outputs in fp16 or bf16 to fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write a launch configuration for this machine, unless the file exists.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: by default the file that `windlass launch` reads.

    Returns:
        The file, or False if it exists.
    """
    path = default_file(os.environ) if save_location is None else Path(save_location)
    settings = basic_settings(mixed_precision, visible_devices(), "mixed_precision")
    if path.exists():
        return False
    write_file(settings, path)
    return path


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Update `destination` by `source` recursively, in place."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return True if something on this machine listens at the port (29500 by default)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit that is at most the size."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return `obj.a.b` for "a.b"."""
    return functools.reduce(getattr, attr.split("."), obj)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar.

    Args:
        args, kwargs: arguments of tqdm.
        main_process_only: only the first process of each machine draws it.
    """
    # As accelerate, whose first argument was `main_process_only` once.
    if args and isinstance(args[0], bool):
        raise ValueError("pass main_process_only by keyword; the first argument of tqdm is an iterable")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return require("tqdm.auto", "draw a bar").tqdm(*args, **kwargs)
