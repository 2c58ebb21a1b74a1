"""Load the weights of a checkpoint into a model, each tensor directly to its place: a device, the host or the disk.

At most one tensor is in host memory beside those that stay there. Weights whose place is the disk are not copied from
safetensors files: the index of offloaded weights refers to these, which must not be moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.files import Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.stored import PICKLED, Folder, StoredTensors, open_weights
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.compat.big_models.auto_device_map import (
    DeviceMap,
    check_tied_parameters_on_same_device,
    lookup,
    places_of,
)
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
from windlass.core.errors import CheckpointError, ConfigError, Problem, refuse
from windlass.core.logs import get_logger

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
    with _opened(find_checkpoint(checkpoint)) as tensors:
        loading.take(tensors)
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
    with _opened(path) as tensors:
        found = {name: tensors.read(name) for name in tensors.names}
    for name, tensor in found.items():
        place = next(iter(places)) if len(places) == 1 else lookup(device_map or {}, name)
        found[name] = tensor if place in (None, "disk") else tensor.to(place)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[StoredTensors]:
    """The tensors of a file of weights, or of all files of an index."""
    with open_weights(Folder(path.parent, Files(), frozenset()), path.name) as tensors:
        for file, written_by in tensors.formats.items():
            if written_by != "pt":
                raise CheckpointError(
                    f"{file} was written for {written_by!r}, whose layout of weights differs from PyTorch's"
                )
        if astray := [kept for kept in tensors.aliases.values() if kept not in tensors]:
            raise CheckpointError(f"{path} ties names to weights that it does not have: {shorten(astray)}")
        yield tensors


def _check_arguments(
    device_map: DeviceMap | None,
    offload_folder: str | os.PathLike[str] | None,
    offload_8bit_bnb: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    problems = []
    if device_map is not None and "disk" in places_of(device_map) and offload_folder is None:
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
    refuse(problems)


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint, or its index; `CheckpointError` if there is none, or not exactly one index."""
    path = Path(checkpoint)
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    if (path / WEIGHTS_NAME).is_file():
        return path / WEIGHTS_NAME
    indices = sorted(path.glob("*.safetensors.index.json"))
    if not indices and (path / PICKLED_NAME).is_file():
        return path / PICKLED_NAME
    indices = indices or sorted(path.glob("*.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has several indices ({shorten(i.name for i in indices)}); pass the one to load"
        )
    if indices:
        return indices[0]
    raise CheckpointError(
        f"{path} has neither {WEIGHTS_NAME} nor {PICKLED_NAME} nor an index of several files (*.index.json)"
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
        self._sources: dict[str, str] = {}  # the name of each weight in its file
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

    def take(self, tensors: StoredTensors) -> None:
        """Load each tensor."""
        for name, stored in [*((name, name) for name in tensors.names), *tensors.aliases.items()]:
            if name not in self._targets:
                self._unexpected.append(name)
            elif name not in self._loaded:  # its twin may have loaded it
                self._put(tensors, name, stored)
            elif name not in self._sources:
                self._check_twin(tensors, name, stored)
        # Tied weights on other devices, of which the checkpoint has only one.
        for group in self._tied:
            stored = next((self._sources[name] for name in group if name in self._sources), "")
            for name in group if stored else ():
                if name not in self._loaded:
                    self._put(tensors, name, stored)

    def _put(self, tensors: StoredTensors, name: str, stored: str) -> None:
        old, place, dtype = self._targets[name], self._place(name), self._dtype_of(name)
        path = tensors.paths[stored]
        if tensors.shape(stored) != tuple(old.shape):
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensors.shape(stored))}, in the model it has {list(old.shape)}"
            )
        if place == "disk":
            empty = old.detach().to(device=META, dtype=dtype)
            put_tensor(self._model, name, renewed(old, empty) if isinstance(old, nn.Parameter) else empty)
            if path.suffix in PICKLED:
                offload_weight(tensors.read(stored).to(dtype), name, self._offload_folder, self.index)
            else:
                self.index[name] = index_entry(str(path.resolve()), stored, dtype)
        elif not old.is_meta and old.device == place and old.dtype == dtype:
            with torch.no_grad():
                old.copy_(tensors.read(stored))  # in place: optimizers and ties refer to this tensor
        else:
            set_module_tensor_to_device(self._model, name, place, tensors.read(stored), dtype)
        self._loaded.add(name)
        self._sources[name] = stored
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

    def _check_twin(self, tensors: StoredTensors, name: str, stored: str) -> None:
        """Check that a weight which was loaded from its twin's data is stored with the same values."""
        twin = next(other for other in self._twins[name] if other in self._sources)
        kept = self._sources[twin]
        if kept != stored and not torch.equal(tensors.read(kept), tensors.read(stored)):
            raise CheckpointError(
                f"{tensors.paths[stored]}: {name} and {twin} differ, and the model ties them"
            )

    def finish(self, checkpoint: Path, strict: bool) -> None:
        """Log names that do not match, or raise `CheckpointError` if `strict`."""
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
