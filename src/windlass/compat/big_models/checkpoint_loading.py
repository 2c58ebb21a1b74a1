"""Load the weights of a checkpoint into a model, each tensor directly to its place: a device, the host or the disk.

At most one tensor is in host memory beside those that stay there. Weights whose place is the disk are not copied from
safetensors files: the index of offloaded weights refers to these, which must not be moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.deferred import TensorSource
from windlass.checkpoint.files import Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.tensor_file import TensorFile, open_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME, read_aliases
from windlass.compat.big_models.device_map import DeviceMap, check_tied_parameters_on_same_device, lookup
from windlass.compat.big_models.module_tensors import (
    META,
    Place,
    device_of,
    find_tied_parameters,
    get_tensor,
    put_tensor,
    renewed,
    set_module_tensor_to_device,
    torch_dtype,
)
from windlass.compat.big_models.offloaded import Index, index_entry, offload_weight, save_offload_index
from windlass.compat.readers.torch_file import open_weights
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger

PICKLED = (".bin", ".pt", ".pth", ".ckpt")  # files of torch.save, of which nothing is executed
PICKLED_NAME = "pytorch_model.bin"
_logger = get_logger(__name__)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights of a checkpoint into a model, which may be on the meta device.

    Args:
        checkpoint: a safetensors file, one of `torch.save` with a state dict, the JSON index of several, or a folder
            with `model.safetensors`, `pytorch_model.bin` or one index.
        device_map: the place of each module's weights (see `infer_auto_device_map`). By default each tensor keeps its
            device; those on the meta device go to the host.
        offload_folder: the folder for the index of weights on disk, and for copies of those that are in files of
            `torch.save`; required if the map names the disk.
        dtype: the dtype to cast floating-point weights to; by default that of each tensor in the model.
        offload_state_dict: no effect, because weights are never collected in host memory.
        offload_buffers: buffers of modules on disk stay there too, instead of going to the host.
        keep_in_fp32_modules: names of modules whose weights are cast to fp32 instead of `dtype`.
        strict: raise if the model and the checkpoint have different names, instead of logging a warning.
        offload_8bit_bnb: refused unless it is False.
        full_state_dict: refused unless it is True.
        broadcast_from_rank0: refused unless it is False.

    Raises:
        ConfigError: arguments that are not supported, all of them at once.
        CheckpointError: no such checkpoint, a damaged file, another shape; if strict, other names.
    """
    _check_arguments(device_map, offload_folder, offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    keep_in_fp32, folder = keep_in_fp32_modules or (), Path(offload_folder or "")
    loading = _Loading(model, device_map, torch_dtype(dtype), keep_in_fp32, offload_buffers, folder)
    found = find_checkpoint(checkpoint)
    for path in found.files:
        with _opened(path) as (file, aliases):
            loading.take(path, file, aliases)
    loading.take_aliases(found.aliases)
    loading.finish(Path(checkpoint), strict)
    if offload_folder is not None:
        save_offload_index(loading.index, offload_folder)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, Tensor]:
    """Return the tensors of one file of weights by name. Raises CheckpointError if the file is missing, damaged, or was
    written for another library.

    Args:
        checkpoint_file: a safetensors file, or one of `torch.save`, of which nothing is executed.
        device_map: the place of each module's weights. A map with one device applies to all; what it does not cover,
            or puts on disk, is on the host, as everything is by default.
    """
    path, places = Path(checkpoint_file), set((device_map or {}).values())
    with _opened(path) as (file, _):
        found = {name: file.read(name) for name in file.names}
    for name, tensor in found.items():
        place = next(iter(places)) if len(places) == 1 else lookup(device_map or {}, name)
        found[name] = tensor if place in (None, "disk") else tensor.to(place)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TensorSource, Mapping[str, str]]]:
    """The tensors of one file of weights, and for each tied name the one that it is stored under."""
    if path.suffix in PICKLED:
        with open_weights(path, Files()) as pickled:
            yield pickled, pickled.aliases
        return
    with open_tensors(path, Files()) as file:
        _check_format(path, file)
        yield file, read_aliases(path, file.metadata)


def _check_arguments(
    device_map: DeviceMap | None,
    offload_folder: str | os.PathLike[str] | None,
    offload_8bit_bnb: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    problems = []
    if device_map is not None and "disk" in device_map.values() and offload_folder is None:
        fix = "the device map puts modules on disk: name a folder for the index of their weights"
        problems.append(Problem("offload_folder", None, fix))
    if offload_8bit_bnb:
        fix = "8-bit weights are not supported; leave it False"
        problems.append(Problem("offload_8bit_bnb", True, fix))
    if not full_state_dict:
        fix = "checkpoints hold whole tensors; leave it True"
        problems.append(Problem("full_state_dict", False, fix))
    if broadcast_from_rank0:
        fix = "every process reads the files; for a single reader, prepare the model with FSDP and "
        fix += "cpu_ram_efficient_loading"
        problems.append(Problem("broadcast_from_rank0", True, fix))
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class WeightFiles:
    """The files of a checkpoint, and for each name that its index ties the (file, name) under which it is stored."""

    files: list[Path]
    aliases: dict[str, tuple[Path, str]]


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> WeightFiles:
    """The files of a checkpoint; `CheckpointError` if there are none, or not exactly one valid index."""
    path = Path(checkpoint)
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else WeightFiles([path], {})
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    if (path / WEIGHTS_NAME).is_file():
        return WeightFiles([path / WEIGHTS_NAME], {})
    indices = sorted(path.glob("*.safetensors.index.json"))
    if not indices and (path / PICKLED_NAME).is_file():
        return WeightFiles([path / PICKLED_NAME], {})
    indices = indices or sorted(path.glob("*.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has several indices ({shorten(i.name for i in indices)}); pass the one to load"
        )
    if indices:
        return _indexed(indices[0])
    raise CheckpointError(
        f"{path} has neither {WEIGHTS_NAME} nor {PICKLED_NAME} nor an index of several files (*.index.json)"
    )


def _indexed(path: Path) -> WeightFiles:
    index = strict_json.read(path, Files())
    names = index.get("weight_map", index) if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{path} is not an index: it maps no weights to files")
    files = sorted(set(names.values()))
    if odd := [file for file in files if Path(file).name != file or file in (".", "..")]:
        raise CheckpointError(f"{path} names files outside its folder: {shorten(odd)}")
    _check_complete(path, names)
    metadata = index.get("metadata") or {}
    aliases = read_aliases(path, metadata if isinstance(metadata, dict) else {})
    if astray := [kept for kept in aliases.values() if kept not in names]:
        raise CheckpointError(f"{path} ties names to weights that it does not have: {shorten(astray)}")
    stored = {name: (path.parent / names[kept], kept) for name, kept in aliases.items()}
    return WeightFiles([path.parent / file for file in files], stored)


def _check_complete(path: Path, names: Mapping[str, str]) -> None:
    """Check that each file has the weights that the index assigns to it, and is not of another checkpoint."""
    for name in sorted(set(names.values())):
        with _opened(path.parent / name) as (file, aliases):
            listed = [weight for weight, where in names.items() if where == name]
            if missing := [weight for weight in listed if weight not in file and weight not in aliases]:
                raise CheckpointError(
                    f"{path.parent / name} lacks what {path.name} lists in it: {shorten(missing)}"
                )


def _check_format(path: Path, file: TensorFile) -> None:
    written_by = file.metadata.get("format", "pt")
    if written_by != "pt":
        raise CheckpointError(
            f"{path} was written for {written_by!r}, whose layout of weights differs from PyTorch's"
        )


class _Loading:
    """The state of a load: which weights are loaded, and which file each came from."""

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap | None,
        dtype: torch.dtype | None,
        keep_in_fp32: Sequence[str],
        offload_buffers: bool,
        offload_folder: Path,
    ) -> None:
        self._offload_folder = offload_folder
        self._model, self._map, self._dtype = model, device_map, dtype
        self._keep_in_fp32, self._offload_buffers = keep_in_fp32, offload_buffers
        self._tied = find_tied_parameters(model)
        if device_map is not None:
            check_tied_parameters_on_same_device(self._tied, device_map)
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        self._targets = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        self._twins = {
            name: [other for other in group if other != name] for group in self._tied for name in group
        }
        self._loaded: set[str] = set()
        self._sources: dict[str, tuple[Path, str]] = {}  # the file of each weight, and its name there
        self._unexpected: list[str] = []
        self.index: Index = {}

    def _place(self, name: str) -> Place:
        """The place of `name`; `"disk"` only for what may be offloaded."""
        tensor = self._targets[name]
        if self._map is None:
            return torch.device("cpu") if tensor.is_meta else tensor.device
        place = lookup(self._map, name)
        if place is None:
            fix = f"gives no place for {name}; add it, or '' for all other modules"
            raise ConfigError(Problem("device_map", dict(self._map), fix))
        if place != "disk":
            return device_of(place)
        return place if isinstance(tensor, nn.Parameter) or self._offload_buffers else torch.device("cpu")

    def _dtype_of(self, name: str) -> torch.dtype:
        """The dtype of `name` after loading."""
        tensor = self._targets[name]
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        kept = any(key == name or f"{key}." in name for key in self._keep_in_fp32)
        return torch.float32 if kept else self._dtype

    def take(self, path: Path, file: TensorSource, aliases: Mapping[str, str]) -> None:
        """Load each tensor of one file."""
        for name, stored in [*((name, name) for name in file.names), *aliases.items()]:
            if name not in self._targets:
                self._unexpected.append(name)
            elif name not in self._loaded:
                self._put(path, file, name, stored)
                self._sources[name] = path, stored
            elif name not in self._sources:
                self._check_twin(path, file, name, stored)

    def take_aliases(self, aliases: Mapping[str, tuple[Path, str]]) -> None:
        """Load names that the checkpoint stores under others, and that the model does not tie to them."""
        for name, (path, stored) in aliases.items():
            if name in self._targets and name not in self._loaded:
                with _opened(path) as (file, _):
                    self._put(path, file, name, stored)

    def _put(self, path: Path, file: TensorSource, name: str, stored: str) -> None:
        old, place, dtype = self._targets[name], self._place(name), self._dtype_of(name)
        if stored not in file:
            raise CheckpointError(f"{path} stores {name} as {stored!r}, which it does not have")
        if file.shape(stored) != tuple(old.shape):
            raise CheckpointError(
                f"{path}: {name} has shape {list(file.shape(stored))}, in the model it has {list(old.shape)}"
            )
        if place == "disk":
            empty = old.detach().to(device=META, dtype=dtype)
            put_tensor(self._model, name, renewed(old, empty) if isinstance(old, nn.Parameter) else empty)
            if path.suffix in PICKLED:
                offload_weight(file.read(stored).to(dtype), name, self._offload_folder, self.index)
            else:
                self.index[name] = index_entry(str(path.resolve()), stored, dtype)
        elif not old.is_meta and old.device == place and old.dtype == dtype:
            with torch.no_grad():
                old.copy_(file.read(stored))  # in place: optimizers and ties refer to this tensor
        else:
            set_module_tensor_to_device(self._model, name, place, file.read(stored), dtype)
        self._loaded.add(name)
        self._share(name)

    def _share(self, name: str) -> None:
        """Make the weights tied to `name` that go to the same place the same tensor."""
        new, here = get_tensor(self._model, name), self._place(name)
        for twin in self._twins.get(name, ()):
            if self._place(twin) == here:
                put_tensor(self._model, twin, new)
                self._loaded.add(twin)
                if name in self.index:
                    self.index[twin] = self.index[name]

    def _check_twin(self, path: Path, file: TensorSource, name: str, stored: str) -> None:
        """Check that a weight which was loaded from its twin's data is stored with the same values."""
        twin = next(other for other in self._twins[name] if other in self._sources)
        twin_path, twin_stored = self._sources[twin]
        if (twin_path, twin_stored) == (path, stored):
            return
        with _opened(twin_path) as (other, _):
            if not torch.equal(other.read(twin_stored), file.read(stored)):
                raise CheckpointError(f"{path}: {name} and {twin} differ, and the model ties them")

    def finish(self, checkpoint: Path, strict: bool) -> None:
        """Log names that do not match, or raise `CheckpointError` if `strict`."""
        self._copy_to_twins_elsewhere()
        missing = [name for name in self._targets if name not in self._loaded]
        lines = []
        if missing:
            lines.append(f"{len(missing)} weights of the model are not in it: {shorten(missing)}")
        if self._unexpected:
            count = len(self._unexpected)
            lines.append(f"{count} of its weights are not in the model: {shorten(self._unexpected)}")
        if lines and strict:
            raise CheckpointError(
                f"{checkpoint} does not fit this {type(self._model).__name__}: {'; '.join(lines)}"
            )
        for line in lines:
            _logger.warning("%s: %s", checkpoint, line)

    def _copy_to_twins_elsewhere(self) -> None:
        """Load tied weights on other devices, of which the checkpoint has only one."""
        for group in self._tied:
            source = next((name for name in group if name in self._loaded), None)
            for name in group:
                if source is not None and name not in self._loaded:
                    self._copy(source, name)

    def _copy(self, source: str, name: str) -> None:
        if source in self.index:
            entry = self.index[source]
            # Absolute unless the file was written there.
            path = self._offload_folder / entry["safetensors_file"]
            with _opened(path) as (file, _):
                self._put(path, file, name, entry["weight_name"])
            return
        place, value = self._place(name), get_tensor(self._model, source)
        if place == "disk":
            raise CheckpointError(
                f"{name} is tied to {source}, and the checkpoint stores only that one; put both in the same place"
            )
        set_module_tensor_to_device(self._model, name, place, value.detach(), self._dtype_of(name))
        self._loaded.add(name)
