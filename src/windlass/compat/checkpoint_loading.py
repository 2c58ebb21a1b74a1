"""A checkpoint's weights, one tensor at a time, each straight to its place in a model: a device, the host or the disk.

Never more than one tensor lies in host memory beside those that stay there. Weights whose place is the disk are not
copied: the index of offloaded weights points into the checkpoint, which must stay where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.tensor_file import TensorFile, open_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME, read_aliases
from windlass.compat.device_map import DeviceMap, check_tied_parameters_on_same_device, lookup
from windlass.compat.offloaded import Index, index_entry, save_offload_index
from windlass.compat.ties import find_tied_parameters
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.transforms.module_tensors import (
    META,
    Place,
    device_of,
    put_tensor,
    renewed,
    set_module_tensor_to_device,
    torch_dtype,
)

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "is a pickle, which can run any code and is not read. Convert it once, where you trust it: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)
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
        checkpoint: a safetensors file, the JSON index of several, or a folder with `model.safetensors` or one index.
        device_map: where each module's weights go (see `infer_auto_device_map`). Without it each tensor is filled where
            it is, or on the host if it has no data.
        offload_folder: where the index of weights on disk is written; needed if the map names the disk.
        dtype: what floating-point weights are cast to; by default each takes the dtype it has in the model.
        offload_state_dict: has no further effect: weights are never collected in host memory.
        offload_buffers: buffers of modules on disk stay there as well, instead of going to the host.
        keep_in_fp32_modules: names of modules whose weights are not cast to `dtype` but to fp32.
        strict: names that the model or the checkpoint lacks are errors instead of warnings.
        offload_8bit_bnb, full_state_dict, broadcast_from_rank0: refused unless they have their defaults.

    Raises:
        ConfigError: arguments that cannot be honoured, all at once.
        CheckpointError: no such checkpoint, a pickle, a damaged file, a shape that differs; strict: other names.
    """
    _check_arguments(device_map, offload_folder, offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    tied = find_tied_parameters(model)
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)
    rules = _Rules(device_map, torch_dtype(dtype), list(keep_in_fp32_modules or []), offload_buffers)
    loading = _Loading(model, rules, tied)
    found = find_checkpoint(checkpoint)
    for path in found.files:
        with open_tensors(path, Files()) as file:
            _check_format(path, file)
            loading.take(path, file)
    loading.take_aliases(found.aliases)
    loading.finish(Path(checkpoint), strict)
    if offload_folder is not None:
        save_offload_index(loading.index, offload_folder)


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
        problems.append(
            Problem("offload_8bit_bnb", True, "8-bit weights are not loaded here; leave it False")
        )
    if not full_state_dict:
        fix = "safetensors checkpoints hold whole tensors; leave it True"
        problems.append(Problem("full_state_dict", False, fix))
    if broadcast_from_rank0:
        fix = "every process reads the files; to read once for all, prepare the model with FSDP and "
        fix += "cpu_ram_efficient_loading"
        problems.append(Problem("broadcast_from_rank0", True, fix))
    if problems:
        raise ConfigError(problems)


# --- files


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a checkpoint, and where its index says that tied names are stored: (file, name)."""

    files: list[Path]
    aliases: dict[str, tuple[Path, str]]


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> WeightFiles:
    """The files of a checkpoint, checked by name.

    Raises:
        CheckpointError: there are none, there are pickles only, or an index that is ambiguous or names odd files.
    """
    path = Path(checkpoint)
    if path.suffix in PICKLED:
        raise CheckpointError(f"{path} {CONVERT}")
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else WeightFiles([path], {})
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    if (path / WEIGHTS_NAME).is_file():
        return WeightFiles([path / WEIGHTS_NAME], {})
    indices = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has several indices ({shorten(i.name for i in indices)}); give the one to load"
        )
    if indices:
        return _indexed(indices[0])
    pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLED)
    if pickles:
        raise CheckpointError(f"{pickles[0]} {CONVERT}")
    raise CheckpointError(f"{path} has neither {WEIGHTS_NAME} nor an index of several files (*.index.json)")


def _indexed(path: Path) -> WeightFiles:
    index = strict_json.parse(Files().read(path, strict_json.MAX_JSON_BYTES), str(path))
    names = index.get("weight_map", index) if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{path} is not an index: it maps no weights to files")
    files = sorted(set(names.values()))
    if odd := [file for file in files if Path(file).name != file or file in (".", "..")]:
        raise CheckpointError(f"{path} names files outside its folder: {shorten(odd)}")
    if pickles := [file for file in files if Path(file).suffix in PICKLED]:
        raise CheckpointError(f"{path.parent / pickles[0]} {CONVERT}")
    _check_complete(path, names)
    metadata = index.get("metadata") or {}
    aliases = read_aliases(path, metadata if isinstance(metadata, dict) else {})
    if astray := [kept for kept in aliases.values() if kept not in names]:
        raise CheckpointError(f"{path} ties names to weights that it does not have: {shorten(astray)}")
    stored = {name: (path.parent / names[kept], kept) for name, kept in aliases.items()}
    return WeightFiles([path.parent / file for file in files], stored)


def _check_complete(path: Path, names: Mapping[str, str]) -> None:
    """Every weight that an index names is in the file it names: a shard of another checkpoint must not pass."""
    for name in sorted(set(names.values())):
        with open_tensors(path.parent / name, Files()) as file:
            if missing := [weight for weight, where in names.items() if where == name and weight not in file]:
                raise CheckpointError(
                    f"{path.parent / name} lacks what {path.name} says it has: {shorten(missing)}"
                )


def _check_format(path: Path, file: TensorFile) -> None:
    written_by = file.metadata.get("format", "pt")
    if written_by != "pt":
        raise CheckpointError(
            f"{path} was written for {written_by!r}, whose layout of weights differs from PyTorch's"
        )


# --- placing


@dataclass(frozen=True)
class _Rules:
    """What a caller asked for: where weights go, and in which dtype."""

    device_map: DeviceMap | None
    dtype: torch.dtype | None
    keep_in_fp32: list[str]
    offload_buffers: bool

    def place(self, name: str, tensor: Tensor) -> Place:
        """Where `name` goes; `"disk"` only for what may stay there."""
        if self.device_map is None:
            return "cpu" if tensor.is_meta else tensor.device
        place = lookup(self.device_map, name)
        if place is None:
            fix = f"gives no place for {name}; add it, or '' for all the rest"
            raise ConfigError(Problem("device_map", dict(self.device_map), fix))
        stays = isinstance(tensor, nn.Parameter) or self.offload_buffers
        return "cpu" if place == "disk" and not stays else place

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """The dtype that `name` is to have in the model."""
        if self.dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        kept = any(key == name or f"{key}." in name for key in self.keep_in_fp32)
        return torch.float32 if kept else self.dtype


class _Loading:
    """A model as it fills up, file by file."""

    def __init__(self, model: nn.Module, rules: _Rules, tied: list[list[str]]) -> None:
        self._model, self._rules, self._tied = model, rules, tied
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        self._targets = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        self._twins = {name: [other for other in group if other != name] for group in tied for name in group}
        self._loaded: set[str] = set()
        self._sources: dict[str, tuple[Path, str]] = {}  # the file a weight came from, and its name there
        self._unexpected: list[str] = []
        self.index: Index = {}

    def take(self, path: Path, file: TensorFile) -> None:
        """Put each tensor of one file in its place."""
        for name, stored in self._names(path, file):
            if name not in self._targets:
                self._unexpected.append(name)
            elif name not in self._loaded:
                self._put(path, file, name, stored)
                self._sources[name] = path, stored
            elif name not in self._sources:
                self._check_twin(path, file, name, stored)

    def _names(self, path: Path, file: TensorFile) -> Iterator[tuple[str, str]]:
        """Pairs of a name in the model and the name it is stored under."""
        yield from ((name, name) for name in file.names)
        yield from read_aliases(path, file.metadata).items()

    def take_aliases(self, aliases: Mapping[str, tuple[Path, str]]) -> None:
        """Fill names that the checkpoint holds under others, and that the model does not tie to them."""
        for name, (path, stored) in aliases.items():
            if name in self._targets and name not in self._loaded:
                with open_tensors(path, Files()) as file:
                    self._put(path, file, name, stored)

    def _put(self, path: Path, file: TensorFile, name: str, stored: str) -> None:
        old = self._targets[name]
        if stored not in file:
            raise CheckpointError(f"{path} holds {name} under {stored!r}, which it does not have")
        if file.shape(stored) != tuple(old.shape):
            raise CheckpointError(
                f"{path}: {name} has shape {list(file.shape(stored))}, in the model it has {list(old.shape)}"
            )
        place, dtype = self._rules.place(name, old), self._rules.dtype_of(name, old)
        if place == "disk":
            self._leave_on_disk(path, name, stored, old, dtype)
        elif not old.is_meta and old.device == device_of(place) and old.dtype == dtype:
            with torch.no_grad():
                old.copy_(file.read(stored))  # in place: optimizers and ties hold on to this very tensor
        else:
            set_module_tensor_to_device(self._model, name, place, file.read(stored), dtype)
        self._loaded.add(name)
        self._share(name)

    def _leave_on_disk(self, path: Path, name: str, stored: str, old: Tensor, dtype: torch.dtype) -> None:
        empty = old.detach().to(device=META, dtype=dtype)
        put_tensor(self._model, name, renewed(old, empty) if isinstance(old, nn.Parameter) else empty)
        self.index[name] = index_entry(str(path.resolve()), stored, dtype)

    def _share(self, name: str) -> None:
        """Give the weights tied to `name` what it got, where they go to the same place."""
        owner, _, last = name.rpartition(".")
        new = getattr(self._model.get_submodule(owner), last)
        here = self._place(name)
        for twin in self._twins.get(name, ()):
            if self._place(twin) == here:
                put_tensor(self._model, twin, new)
                self._loaded.add(twin)
                if name in self.index:
                    self.index[twin] = self.index[name]

    def _check_twin(self, path: Path, file: TensorFile, name: str, stored: str) -> None:
        """A weight that took its twin's data is stored as well: it must be the same.

        Raises:
            CheckpointError: it is not. The model would run with one of the two, and nobody would know which.
        """
        twin = next(other for other in self._twins[name] if other in self._sources)
        twin_path, twin_stored = self._sources[twin]
        if (twin_path, twin_stored) == (path, stored):
            return
        with open_tensors(twin_path, Files()) as other:
            if not torch.equal(other.read(twin_stored), file.read(stored)):
                raise CheckpointError(f"{path}: {name} and {twin} differ, and the model ties them")

    def _place(self, name: str) -> Place:
        place = self._rules.place(name, self._targets[name])
        return place if place == "disk" else device_of(place)

    def finish(self, checkpoint: Path, strict: bool) -> None:
        """Say what did not match.

        Raises:
            CheckpointError: strict, and something did not.
        """
        self._copy_to_far_twins()
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

    def _copy_to_far_twins(self) -> None:
        """Fill tied weights on other devices, which the checkpoint holds under one name only."""
        for group in self._tied:
            source = next((name for name in group if name in self._loaded), None)
            if source is None:
                continue
            for name in group:
                if name not in self._loaded:
                    self._copy(source, name)

    def _copy(self, source: str, name: str) -> None:
        place, old = self._rules.place(name, self._targets[name]), self._targets[name]
        dtype = self._rules.dtype_of(name, old)
        if source in self.index:
            entry = self.index[source]
            path = Path(entry["safetensors_file"])
            with open_tensors(path, Files()) as file:
                self._put(path, file, name, entry["weight_name"])
            return
        owner, _, last = source.rpartition(".")
        value = getattr(self._model.get_submodule(owner), last)
        if place == "disk":
            raise CheckpointError(
                f"{name} is tied to {source}, which the checkpoint holds it under; put both in the same place"
            )
        set_module_tensor_to_device(self._model, name, place, value.detach(), dtype)
        self._loaded.add(name)
