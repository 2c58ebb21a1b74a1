"""The tensors in a folder by name, one at a time, in any form: whole, in the parts of ranks, or in several files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from windlass.checkpoint import codec, strict_json
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, BASE_STATE, load_adapter
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, read_manifest
from windlass.checkpoint.names import shorten
from windlass.checkpoint.sharded import index_name, open_parts
from windlass.checkpoint.split import SPLIT_FILE, SPLIT_INDEX_NAME
from windlass.checkpoint.tensor_file import Shaped, TensorFile, TensorSource, open_tensors
from windlass.checkpoint.verified import VerifiedFiles
from windlass.checkpoint.weights import WEIGHTS_NAME, fill, load_weights, read_aliases
from windlass.core.errors import CheckpointError
from windlass.core.outside import load_outside
from windlass.dist.sharded import Part

OPTIMIZER = "optimizer"
_OF_DEEPSPEED = ("latest", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
# The file that holds the weights of a folder, or their index, in order of precedence.
_WEIGHTS = (
    index_name("model"),
    WEIGHTS_NAME,
    SPLIT_INDEX_NAME,
    ADAPTER_WEIGHTS,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    *_OF_DEEPSPEED,
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt")  # files of torch.save, of which nothing is executed
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FURTHER_MODEL = re.compile(r"(model_\d+)/")
_OPTIMIZER_FILE = re.compile(rf"({OPTIMIZER}(?:_\d+)?)(?:\.safetensors|\.parts\.json)")
_RANK_FILE = re.compile(r"(.+)-rank-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder and the names of its files. Those of a checkpoint are listed by its manifest and verified."""

    path: Path
    files: Files
    names: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names


def open_folder(path: Path) -> Folder:
    """List the files of a folder; of a checkpoint only the manifest is read."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    files = Files()
    if (path / MANIFEST_NAME).exists():
        info = read_manifest(path, files)
        return Folder(path, VerifiedFiles(info, files), frozenset(info.files))
    found = (entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
    return Folder(path, files, frozenset(found))


class StoredTensors(TensorSource):
    """Tensors from one or several open files, under one set of names.

    Attributes:
        aliases: tied name -> the name that it is stored under.
        paths: name -> its file, of weights that are not in the parts of ranks.
        formats: file of safetensors -> the library for which it was written, "pt" for PyTorch.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[TensorSource, str]] = {}
        self._known: dict[str, Shaped] = {}
        self.aliases: dict[str, str] = {}
        self.paths: dict[str, Path] = {}
        self.formats: dict[Path, str] = {}
        super().__init__(self._known)

    def add(
        self, source: TensorSource, rename: Callable[[str], str] = str, names: Iterable[str] | None = None
    ) -> None:
        """Add the tensors of a file, by default all of them."""
        for name in source.names if names is None else names:
            self._places[rename(name)] = source, name
            self._known[rename(name)] = source.shaped(name)

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        source, stored = self._places[name]
        return source.read(stored, wanted)


def find_weights(folder: Folder) -> str:
    """Name of the file in `folder` that holds its weights, or their index."""
    found = next((name for name in _WEIGHTS if name in folder), None)
    if found is not None:
        return found
    inside = _checkpoints_inside(folder)
    if inside:
        raise CheckpointError(
            f"{folder.path} holds no weights, but checkpoints do: name one, such as {folder.path / inside[-1]}"
        )
    raise CheckpointError(f"{folder.path} holds no weights: there is none of the files {', '.join(_WEIGHTS)}")


def _checkpoints_inside(folder: Folder) -> list[str]:
    """Names of the checkpoints in a folder that is not one itself, by step."""
    parents = (name.removesuffix(f"/{MANIFEST_NAME}") for name in folder.names if "/" in name)
    steps = [found for found in map(_CHECKPOINT.fullmatch, parents) if found is not None]
    return [found[0] for found in sorted(steps, key=lambda found: int(found[1]))]


def further_models(folder: Folder) -> list[str]:
    """Names of the folders in a checkpoint with the models of a loop beside the first one."""
    found = (_FURTHER_MODEL.match(name) for name in folder.names)
    return sorted({name[1] for name in found if name is not None}, key=lambda name: (len(name), name))


@contextmanager
def open_weights(folder: Folder, name: str | None = None) -> Iterator[StoredTensors]:
    """The weights of a model or of its adapters. `name`: their file or index; by default what `find_weights` finds."""
    name, tensors = name or find_weights(folder), StoredTensors()
    with ExitStack() as opened:
        if name == index_name("model"):
            parts = opened.enter_context(open_parts(folder.path, "model", folder.files))
            tensors.add(parts)
            tensors.aliases = parts.aliases
        elif name.endswith(".json"):
            _add_split(tensors, folder, name, opened)
        else:
            _add_file(tensors, folder, name, opened, {})
        yield tensors


def load_folder(folder: Path, model: nn.Module, *, files: Files | None = None) -> None:
    """Copy the weights of `folder` into `model`, in place: one file or several with an index, the parts of ranks, an
    adapter alone, or `pytorch_model.bin`. Files of a checkpoint are verified. A file is loaded as it is.
    """
    if folder.is_file():
        load_weights(folder, model, files=files or Files())
        return
    source = open_folder(folder)
    if files is not None:  # those of an open checkpoint know what was verified, and do not hash it again
        source = replace(source, files=files)
    name = find_weights(source)
    if name == ADAPTER_WEIGHTS:
        base = codec.load_state(folder / BASE_STATE, source.files) if f"{BASE_STATE}.json" in source else None
        load_adapter(folder, model, base, files=source.files)
        return
    with open_weights(source) as tensors:
        fill(folder / name, tensors, tensors.aliases, model)


def _add_split(tensors: StoredTensors, folder: Folder, index_file: str, opened: ExitStack) -> None:
    path = folder.path / index_file
    index = strict_json.read(path, folder.files)
    # As accelerate reads an index: it may be the map itself.
    places = index.get("weight_map", index) if isinstance(index, dict) else None
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(name, str) for name in places.values())
    ):
        raise CheckpointError(f"{path} is not an index: it maps no weights to files")
    listed: dict[str, list[str]] = {}
    for weight, name in places.items():
        listed.setdefault(name, []).append(weight)
    # An index of other people's must not lead to files outside of the folder that the user named.
    if astray := [name for name in listed if Path(name).name != name or name in (".", "..")]:
        raise CheckpointError(f"{path} names {astray[0][:100]!r}, which does not lie in its folder")
    for name in sorted(listed):
        known = _add_file(tensors, folder, name, opened, places)
        if missing := [repr(weight[:100]) for weight in listed[name] if weight not in known]:
            raise CheckpointError(
                f"{folder.path / name} lacks what {path.name} lists in it: {shorten(missing)}"
            )
    metadata = index.get("metadata")
    tensors.aliases |= read_aliases(path, metadata if isinstance(metadata, dict) else {})


def _add_file(
    tensors: StoredTensors, folder: Folder, name: str, opened: ExitStack, places: Mapping[str, str]
) -> set[str]:
    """Add a file of safetensors or, by its name, of another format; return the names in it.

    Args:
        places: the file from which a name is to be read, if the index has it: files of several saves may be joined.
    """
    path = folder.path / name
    weights: Any
    if name in _OF_DEEPSPEED or path.suffix in PICKLED:
        reader = load_outside("folders of DeepSpeed" if name in _OF_DEEPSPEED else "files of torch.save")
        weights = opened.enter_context(reader.open_weights(path, folder.files))
        aliases = weights.aliases
    else:
        weights = _open_file(folder, name, opened)
        tensors.formats[path] = weights.metadata.get("format", "pt")
        aliases = read_aliases(path, weights.metadata)
    tensors.aliases |= aliases
    own = [weight for weight in weights.names if places.get(weight, name) == name]
    tensors.add(weights, names=own)
    tensors.paths |= dict.fromkeys(own, path)
    return {*weights.names, *aliases}


def optimizer_stem(folder: Folder) -> str:
    """What the names of the files of the optimizer begin with. Raises CheckpointError if a loop had several."""
    found = sorted({name[1] for name in map(_OPTIMIZER_FILE.fullmatch, folder.names) if name is not None})
    if len(found) > 1:
        raise CheckpointError(
            f"{folder.path} holds the state of {len(found)} optimizers, and the state of one is exported: read their "
            f"files, {', '.join(f'{stem}*.safetensors' for stem in found[:3])}"
        )
    return found[0] if found else OPTIMIZER


@contextmanager
def open_optimizer(folder: Folder, stem: str = OPTIMIZER) -> Iterator[StoredTensors]:
    """The tensors of an optimizer's state, named `PARAMETER/KEY`. `stem`: of the names of its files; a loop may have
    several optimizers, and models beside the first one.
    """
    tensors = StoredTensors()
    with ExitStack() as opened:
        if f"{stem}.safetensors" in folder:
            whole = _open_file(folder, f"{stem}.safetensors", opened)
            tensors.add(whole, lambda name: name.removeprefix("state/"))
        if index_name(stem) in folder:
            parts = opened.enter_context(open_parts(folder.path, stem, folder.files))
            tensors.add(parts)
            tensors.aliases = parts.aliases
        if not tensors.names:
            other = (
                "; optimizer.pt, which torch.save wrote, is not exported" if "optimizer.pt" in folder else ""
            )
            raise CheckpointError(f"{folder.path} holds no tensors of an optimizer{other}")
        yield tensors


def state_files(folder: Folder) -> list[str]:
    """Files with tensors of other states and of ranks, beside those of the model and the optimizer."""
    known = {find_weights(folder), f"{OPTIMIZER}.safetensors"}
    return sorted(
        name
        for name in folder.names
        if name.endswith(".safetensors") and name not in known and not _is_covered(folder, name)
    )


def _is_covered(folder: Folder, name: str) -> bool:
    """Return True if an index lists the content of this file."""
    of_rank = _RANK_FILE.fullmatch(name)
    if of_rank is not None and index_name(of_rank[1]) in folder:
        return True
    return SPLIT_INDEX_NAME in folder and SPLIT_FILE.fullmatch(name) is not None


@contextmanager
def open_state_file(folder: Folder, name: str) -> Iterator[StoredTensors]:
    """The tensors of one such file."""
    tensors = StoredTensors()
    with ExitStack() as opened:
        tensors.add(_open_file(folder, name, opened))
        yield tensors


def _open_file(folder: Folder, name: str, opened: ExitStack) -> TensorFile:
    return opened.enter_context(open_tensors(folder.path / name, folder.files))
