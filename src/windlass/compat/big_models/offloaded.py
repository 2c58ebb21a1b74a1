"""Weights on disk (or in host memory) that are read when a layer needs them.

A folder of offloaded weights has an `index.json`, `{name: {"safetensors_file", "weight_name", "dtype"}}`, in the format
of transformers. Files are named relative to the folder, or by absolute path if they belong to a checkpoint. A read
allocates one tensor.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import CODES, open_tensors, write_tensors
from windlass.compat.big_models.model_hooks import Inputs, ModelHook, without_compiler
from windlass.compat.big_models.module_tensors import (
    META,
    Place,
    SharedWeight,
    device_of,
    get_non_persistent_buffers,
    get_tensor,
    put_tensor,
    set_module_tensor_to_device,
)
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem
from windlass.core.tensors import dtype_name
from windlass.core.trees import find_device, send_to_device

if sys.platform != "win32":
    import fcntl

# Hooks that bring the weights and inputs of a module to its device for each forward.
#
# Between forwards, an offloaded weight is on the meta device and its data is in a mapping of names to tensors (host
# memory, or a reader of files), so only the layer that runs takes device memory. Offloading is for inference: the
# weights that a forward uses require no gradient.

Weights = Mapping[str, Tensor]


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Moves a module's weights and inputs to one device for its forward."""

    # The device on which the module runs; None leaves inputs and weights where they are
    execution_device: Place | None = None
    offload: bool = False  # remove the weights after each forward, and load them before the next
    io_same_device: bool = False  # move the output to the device of the input
    # Data of offloaded weights, by name relative to the module. None: a copy in host memory.
    weights_map: Weights | None = field(default=None, repr=False)
    # Offload persistent buffers too. Other buffers always stay on the execution device.
    offload_buffers: bool = False
    place_submodules: bool = False  # handle the tensors of submodules too
    skip_keys: str | list[str] | None = None  # keyword arguments, and keys of outputs, that are not moved
    # By name, the copies of weights that are shared with other modules
    tied_params_map: Mapping[str, SharedWeight] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._empty: dict[str, Tensor] = {}  # the meta tensor of each offloaded weight

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors: on the device, or offloaded. Raises ModelError if neither the module nor the
        weights map has the data of a tensor.
        """
        tensors = dict(self._tensors(module))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        away = self._to_offload(module, tensors) if self.offload else set()
        for name in tensors:
            if name not in away and self.execution_device is not None:
                self._set(module, name, self.execution_device)
        for name in away:
            self._set(module, name, META)
            self._empty[name] = get_tensor(module, name)
        return module

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """All names, including tied ones: each of them must be placed."""
        yield from module.named_parameters(recurse=self.place_submodules, remove_duplicate=False)
        yield from module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)

    def _to_offload(self, module: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
        staying = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        if not self.offload_buffers:
            staying |= {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        names = set(tensors) - staying
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in names}
        if missing := sorted(
            name for name in names if tensors[name].is_meta and name not in self.weights_map
        ):
            raise ModelError(
                f"no data for {', '.join(missing)} of a {type(module).__name__}, neither in the module nor in the "
                "offloaded weights; load a checkpoint that has them"
            )
        return {name for name in names if name in self.weights_map}

    def _shared(self, name: str) -> SharedWeight | None:
        return (self.tied_params_map or {}).get(name)

    def _set(self, module: nn.Module, name: str, device: Place, value: Tensor | None = None) -> None:
        set_module_tensor_to_device(module, name, device, value=value, tied_params_map=self._shared(name))

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Load offloaded weights, and move the inputs to the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        for name in self._empty:
            self._load(module, name)
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def _load(self, module: nn.Module, name: str) -> None:
        place = self.original_devices[name] if self.execution_device is None else self.execution_device
        shared = self._shared(name)
        copy = None if shared is None else shared.get(device_of(place))
        if copy is not None:  # without a read from the weights map
            put_tensor(module, name, copy)
            return
        assert self.weights_map is not None
        self._set(module, name, place, self.weights_map[name])
        get_tensor(module, name).requires_grad_(False)  # it is removed before a gradient could be used

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove offloaded weights; with `io_same_device`, move the output to the device of the input."""
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Remove offloaded weights."""
        for name, empty in self._empty.items():
            put_tensor(module, name, empty)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module's weights to their original devices. What had no data before has none after."""
        for name in self._empty:
            if self.weights_map is not None and self.original_devices[name] != META:
                self._set(module, name, self.original_devices[name], self.weights_map[name])
        self._empty.clear()
        return module


INDEX_NAME = "index.json"
_OURS = "offloaded-"  # prefix of the files that are written here
_UNFINISHED = f"{_OURS}new.safetensors"

Index = dict[str, dict[str, str]]


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index:
    """Write one tensor to a folder of offloaded weights, and return `index` with its entry.

    The folder's index does not change; see `save_offload_index`.
    """
    index = {} if index is None else index
    with _alone_in(Path(offload_folder)) as folder:
        index.update(_write(folder, {weight_name: weight}, Files()))
    return index


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors to a folder of offloaded weights, and keep those that are there under other names."""
    if state_dict:
        with _alone_in(Path(save_dir)) as folder:
            _add_entries(_write(folder, state_dict, Files()), folder)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[Path]:
    """Within the body no other process writes to the folder, if its file system has locks: the processes of a job may
    all offload the same model.
    """
    Files().ensure_folder(folder)
    if sys.platform == "win32":
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def _write(folder: Path, tensors: Mapping[str, Tensor], files: Files) -> Index:
    new = folder / _UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(new)  # of a process that was killed
    digest = write_tensors(new, tensors, {"format": "pt"}, files=files).sha256
    # Named by its content: a model that was offloaded before reads its own weights or none, never those of another.
    path = folder / f"{_OURS}{digest[:32]}.safetensors"
    files.rename(new, path)
    return {name: index_entry(path.name, name, tensor.dtype) for name, tensor in tensors.items()}


def index_entry(file: str, weight_name: str, dtype: torch.dtype) -> dict[str, str]:
    """The entry of one tensor in an index: its file, its name there, and the dtype to load it in."""
    return {"safetensors_file": file, "weight_name": weight_name, "dtype": dtype_name(dtype)}


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index, replace those of the same names, and remove files that are no longer named."""
    if index:
        with _alone_in(Path(offload_folder)) as folder:
            _add_entries(index, folder)


def _add_entries(index: Index, folder: Path) -> None:
    files, path = Files(), folder / INDEX_NAME
    merged = {**(read_offload_index(folder) if path.exists() else {}), **index}
    with files.replacing(path) as new:
        files.write(new, [strict_json.dump(merged, str(path))])
    named = {entry["safetensors_file"] for entry in merged.values()}
    # After the index: whatever interrupts this, the index names only files that exist.
    for file in sorted(folder.glob(f"{_OURS}*.safetensors")):
        if file.name not in named:
            files.remove_file(file)


def read_offload_index(folder: str | os.PathLike[str]) -> Index:
    """The index of a folder of offloaded weights; `CheckpointError` if it is damaged or names raw `.dat` files."""
    path = Path(folder) / INDEX_NAME
    index = strict_json.read(path, Files())
    if not isinstance(index, dict):
        raise CheckpointError(f"{path} is not a map")
    for name, entry in index.items():
        if isinstance(entry, dict) and "safetensors_file" not in entry:
            raise CheckpointError(
                f"{path}: {name!r} is not in a safetensors file. Raw .dat files, as accelerate writes them, have no "
                "header to verify and are not read; offload the model to an empty folder"
            )
        if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
            raise CheckpointError(f"{path}: the entry of {name!r} is malformed")
    return index


def _dtype(name: str, key: str) -> torch.dtype:
    known = {dtype_name(dtype): dtype for dtype in CODES}
    if name not in known:
        raise CheckpointError(f"the index of offloaded weights gives {key!r} the unknown dtype {name[:40]!r}")
    return known[name]


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Tensors by name: those of `state_dict` as they are; others are read from their files at each access.

    Args:
        state_dict: tensors in memory; they have precedence over those on disk.
        save_folder: a folder with an index; files in the index are relative to it.
        index: replaces the folder's index.
        device: the device of tensors that are read; the host by default.

    Raises:
        ConfigError: none of the first three arguments is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, str]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            fix = "give tensors (state_dict), a folder of offloaded weights (save_folder), or an index"
            raise ConfigError(Problem("state_dict", None, fix))
        self.state_dict = dict(state_dict or {})
        self.save_folder = Path(save_folder or "").absolute()  # a script may change its working directory
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index = dict(index or {})
        self.device = device
        self._names = list(dict.fromkeys([*self.state_dict, *self.index]))

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        # An absolute path in the index replaces the folder.
        path, name = self.save_folder / entry["safetensors_file"], entry.get("weight_name", key)
        with open_tensors(path, Files()) as file:
            if name not in file:
                raise CheckpointError(
                    f"{path} has no tensor {name!r}, which the index of offloaded weights lists"
                )
            tensor = file.read(name)
        dtype = _dtype(entry["dtype"], key) if "dtype" in entry else None
        return tensor.to(device=self.device, dtype=dtype)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index  # unlike the inherited one, reads no tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
