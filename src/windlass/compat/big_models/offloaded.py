"""Weights on disk (or in host memory) that are read when a layer needs them.

A folder of offloaded weights has an `index.json`, `{name: {"safetensors_file", "weight_name", "dtype"}}`, in the format
of transformers. Files are named relative to the folder, or by absolute path if they belong to a checkpoint. A read
allocates one tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import CODES, open_tensors, write_tensors
from windlass.core.errors import CheckpointError, ConfigError, Problem

INDEX_NAME = "index.json"
_OURS = "offloaded-"  # prefix of the files that are written here

Index = dict[str, dict[str, str]]


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index:
    """Write one tensor to a folder of offloaded weights, and return `index` with its entry.

    The folder's index does not change; see `save_offload_index`.
    """
    index = {} if index is None else index
    index.update(_write(Path(offload_folder), {weight_name: weight}, Files()))
    return index


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors to a folder of offloaded weights, and keep those that are there under other names."""
    if state_dict:
        save_offload_index(_write(Path(save_dir), state_dict, Files()), save_dir)


def _write(folder: Path, tensors: Mapping[str, Tensor], files: Files) -> Index:
    files.ensure_folder(folder)
    number = 0
    while (path := folder / f"{_OURS}{number:05d}.safetensors").exists():
        number += 1
    write_tensors(path, tensors, {"format": "pt"}, files=files)
    return {name: index_entry(path.name, name, tensor.dtype) for name, tensor in tensors.items()}


def index_entry(file: str, weight_name: str, dtype: torch.dtype) -> dict[str, str]:
    """The entry of one tensor in an index: its file, its name there, and the dtype to load it in."""
    return {"safetensors_file": file, "weight_name": weight_name, "dtype": str(dtype).removeprefix("torch.")}


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index, replace those of the same names, and remove files that are no longer named."""
    if not index:
        return
    files, folder = Files(), Path(offload_folder)
    files.ensure_folder(folder)
    path = folder / INDEX_NAME
    merged = {**(read_offload_index(folder) if path.exists() else {}), **index}
    with files.replacing(path) as new:
        files.write(new, [strict_json.dump(merged, str(path))])
    named = {entry["safetensors_file"] for entry in merged.values()}
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
    known = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
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
        self.save_folder = Path(save_folder or "")
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index = dict(index or {})
        self.device = device
        self._names = list(dict.fromkeys([*self.state_dict, *self.index]))

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
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
