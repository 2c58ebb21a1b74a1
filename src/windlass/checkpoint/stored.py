"""The tensors that lie in a folder, by name and one at a time, however they were written: whole, in ranks' parts, or as
the several files that `from_pretrained` reads. No model is built for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS
from windlass.checkpoint.deferred import TensorSource
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, read_manifest
from windlass.checkpoint.sharded import index_name, open_parts
from windlass.checkpoint.split import SPLIT_FILE, SPLIT_INDEX_NAME
from windlass.checkpoint.strict_json import MAX_JSON_BYTES
from windlass.checkpoint.tensor_file import Shaped, TensorFile, open_tensors
from windlass.checkpoint.torch_file import TorchWeights, open_torch_file
from windlass.checkpoint.verified import VerifiedFiles
from windlass.checkpoint.weights import WEIGHTS_NAME, read_aliases
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import Part

OPTIMIZER = "optimizer"
_TORCH_WEIGHTS, _TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Weights as transformers writes them where they are not one file of safetensors.
FURTHER_FORMS = (SPLIT_INDEX_NAME, _TORCH_WEIGHTS, _TORCH_INDEX)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_RANK_FILE = re.compile(r"(.+)-rank-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder to read from, and the files in it. A checkpoint's are verified as they are opened, and are all that its
    manifest lists; of another folder (`save_model` wrote it) they are taken as they are.
    """

    path: Path
    files: Files
    names: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names


def open_folder(path: Path) -> Folder:
    """Look at a folder; of a checkpoint only the manifest is read yet.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    files = Files()
    if (path / MANIFEST_NAME).exists():
        info = read_manifest(path, files)
        return Folder(path, VerifiedFiles(info, files), frozenset(info.files))
    found = (entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
    return Folder(path, files, frozenset(found))


class StoredTensors:
    """Tensors from one or several open files, under one set of names.

    Attributes:
        aliases: tied name -> the name that it is stored under.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[TensorSource, str]] = {}
        self.aliases: dict[str, str] = {}

    def add(self, source: TensorSource, rename: Callable[[str], str] = str) -> None:
        """Take in all tensors of a file."""
        self._places |= {rename(name): (source, name) for name in source.names}

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        source, stored = self._places[name]
        return source.shape(stored)

    def dtype(self, name: str) -> torch.dtype:
        source, stored = self._places[name]
        return source.dtype(stored)

    def shaped(self, name: str) -> Shaped:
        return Shaped(self.dtype(name), self.shape(name))

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """One tensor, or this part of it, on the host."""
        source, stored = self._places[name]
        return source.read(stored, wanted)


def weights_stem(folder: Folder) -> str:
    """What the files of the folder's weights are called: "model", or "adapter_model" where only adapters were saved.

    Raises:
        CheckpointError: it holds no weights.
    """
    if any(name in folder for name in (index_name("model"), WEIGHTS_NAME, SPLIT_INDEX_NAME)):
        return "model"
    if ADAPTER_WEIGHTS in folder:
        return "adapter_model"
    if _TORCH_WEIGHTS in folder or _TORCH_INDEX in folder:
        return "model"
    inside = _checkpoints_inside(folder)
    if inside:
        raise CheckpointError(
            f"{folder.path} holds no weights, but checkpoints do: name one, such as {folder.path / inside[-1]}"
        )
    raise CheckpointError(
        f"{folder.path} holds no weights: there is no {WEIGHTS_NAME}, {index_name('model')}, {SPLIT_INDEX_NAME}, "
        f"{ADAPTER_WEIGHTS} or {_TORCH_WEIGHTS}"
    )


def _checkpoints_inside(folder: Folder) -> list[str]:
    """Checkpoints that lie in a folder which is none itself, by their steps."""
    parents = (name.removesuffix(f"/{MANIFEST_NAME}") for name in folder.names if "/" in name)
    steps = [found for found in map(_CHECKPOINT.fullmatch, parents) if found is not None]
    return [found[0] for found in sorted(steps, key=lambda found: int(found[1]))]


@contextmanager
def open_weights(folder: Folder) -> Iterator[StoredTensors]:
    """The weights of a model or of its adapters.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    stem, tensors = weights_stem(folder), StoredTensors()
    with ExitStack() as opened:
        if index_name(stem) in folder:
            parts = opened.enter_context(open_parts(folder.path, stem, folder.files))
            tensors.add(parts)
            tensors.aliases = parts.aliases
        elif f"{stem}.safetensors" in folder:
            file = _open_file(folder, f"{stem}.safetensors", opened)
            tensors.add(file)
            tensors.aliases = read_aliases(folder.path / f"{stem}.safetensors", file.metadata)
        elif SPLIT_INDEX_NAME in folder:
            _add_split(tensors, folder, SPLIT_INDEX_NAME, opened)
        elif _TORCH_WEIGHTS in folder:
            _add_file(tensors, folder, _TORCH_WEIGHTS, opened)
        else:
            _add_split(tensors, folder, _TORCH_INDEX, opened)
        yield tensors


def _add_split(tensors: StoredTensors, folder: Folder, index_file: str, opened: ExitStack) -> None:
    path = folder.path / index_file
    index = strict_json.parse(folder.files.read(path, MAX_JSON_BYTES), str(path))
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{path} is malformed: weight_map must be a map of tensors to files")
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name[:100]!r}, which does not lie in its folder")
        _add_file(tensors, folder, name, opened)
    absent = next((name for name in places if name not in tensors and name not in tensors.aliases), None)
    if absent is not None:
        raise CheckpointError(f"{path} names tensor {absent[:100]!r}, which its file does not hold")
    metadata = index.get("metadata")
    tensors.aliases |= read_aliases(path, metadata if isinstance(metadata, dict) else {})


def _add_file(tensors: StoredTensors, folder: Folder, name: str, opened: ExitStack) -> None:
    """Take in a file of safetensors or, by its suffix, of torch.save."""
    if not name.endswith(".bin"):
        tensors.add(_open_file(folder, name, opened))
        return
    path = folder.path / name
    weights = TorchWeights(path, opened.enter_context(open_torch_file(path, folder.files)))
    tensors.add(weights)
    tensors.aliases |= weights.aliases


@contextmanager
def open_optimizer(folder: Folder) -> Iterator[StoredTensors]:
    """The tensors of the optimizer's state, as `PARAMETER/KEY` however they were written.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    tensors = StoredTensors()
    with ExitStack() as opened:
        if f"{OPTIMIZER}.safetensors" in folder:
            whole = _open_file(folder, f"{OPTIMIZER}.safetensors", opened)
            tensors.add(whole, lambda name: name.removeprefix("state/"))
        if index_name(OPTIMIZER) in folder:
            tensors.add(opened.enter_context(open_parts(folder.path, OPTIMIZER, folder.files)))
        if not tensors.names:
            other = (
                "; optimizer.pt, which torch.save wrote, is not exported" if "optimizer.pt" in folder else ""
            )
            raise CheckpointError(f"{folder.path} holds no tensors of an optimizer{other}")
        yield tensors


def state_files(folder: Folder) -> list[str]:
    """Files of further tensors, beside the model's and the optimizer's: of other states, and of each rank."""
    known = {WEIGHTS_NAME, ADAPTER_WEIGHTS, f"{OPTIMIZER}.safetensors"}
    return sorted(
        name
        for name in folder.names
        if name.endswith(".safetensors") and name not in known and not _is_covered(folder, name)
    )


def _is_covered(folder: Folder, name: str) -> bool:
    """Whether an index says what is in this file."""
    of_rank = _RANK_FILE.fullmatch(name)
    if of_rank is not None and index_name(of_rank[1]) in folder:
        return True
    return SPLIT_INDEX_NAME in folder and SPLIT_FILE.fullmatch(name) is not None


@contextmanager
def open_state_file(folder: Folder, name: str) -> Iterator[StoredTensors]:
    """The tensors of one such file.

    Raises:
        CheckpointError: it is damaged.
    """
    tensors = StoredTensors()
    with ExitStack() as opened:
        tensors.add(_open_file(folder, name, opened))
        yield tensors


def _open_file(folder: Folder, name: str, opened: ExitStack) -> TensorFile:
    return opened.enter_context(open_tensors(folder.path / name, folder.files))
