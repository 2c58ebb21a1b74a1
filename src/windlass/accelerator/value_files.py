"""Single files of a script: tensors and plain values, in the format that the ending of the name says."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import decode, encode, refers_to_tensors
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import open_tensors, write_tensors
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import at_home, is_url
from windlass.core.logs import get_job_logger, warn_once

_log = get_job_logger(__name__)
_TENSORS, _VALUES = ".safetensors", ".json"
# In the header of the tensors: the hash of the values that were saved with them. Two files cannot be replaced in one
# instant, and tensors of one save beside values of another would be read without an error.
_DIGEST = "values_sha256"
# Empty bytes, and numbers and arrays of numpy, under the names that `torch.save` gives them. `windlass.utils.load`
# reads them; `torch.load` does so with `weights_only=False`.
_MORE = {"builtins.bytes", "numpy.dtype", "numpy.ndarray"} | {
    f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")
}


def on_this_machine(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a file or folder outside of checkpoints. Raises ConfigError for a URL."""
    if is_url(path):
        fix = "is remote, where checkpoints alone can be written; use a folder of this machine"
        raise ConfigError(Problem("folder", os.fspath(path), fix))
    return at_home(path).absolute()


def warn_if_unsafe(safe_serialization: bool) -> None:
    """Warn once that `safe_serialization=False` is mapped to True."""
    if not safe_serialization:
        warn_once(_log, "safe_serialization=False has no effect: safetensors are written, never pickle")


def save_values(path: Path, values: Any, safe_serialization: bool = False) -> None:
    """Write `values`; the file that is there is replaced in one instant. Raises CheckpointError for values that cannot
    be saved; they are named.

    Args:
        path: ".safetensors" takes a dict of tensors. ".json" takes a nest of plain values, whose tensors go to a
            safetensors file of the same name, unless one is there that another save wrote. Any other ending takes such
            a nest as one file of `torch.save`.
        safe_serialization: write a safetensors file under any name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if safe_serialization or path.suffix == _TENSORS:
        _save_tensors(path, values)
    elif path.suffix == _VALUES:
        _save_nest(path, values)
    else:
        _save_for_torch(path, values)


def load_values(path: Path) -> Any:
    """Read what `save_values` wrote as safetensors and JSON, with tensors on the host. Raises CheckpointError if there
    is no such file, or another program wrote it.
    """
    if path.suffix == _TENSORS:
        with open_tensors(path, Files()) as tensors:
            return {name: tensors.read(name) for name in tensors.names}
    if path.suffix == _VALUES:
        return _load_nest(path)
    # Windlass 0.1 once wrote such a pair in place of a file of torch.save.
    place = path.with_name(path.name + _VALUES)
    if place.exists():
        return _load_nest(place)
    raise CheckpointError(f"there is neither {path} nor {place.name} beside it")


def _save_tensors(path: Path, tensors: Any) -> None:
    """Write a dict of tensors as a safetensors file; tensors that share memory are written once for each name. Raises
    CheckpointError if it is not a dict of tensors.
    """
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path.name} holds a dict of tensors; end the name in .json for anything else")
    files = Files()
    with files.replacing(path) as new:
        write_tensors(new, dict(tensors), {"format": "pt"}, files=files)


def _save_for_torch(path: Path, values: Any) -> None:
    """Write a file of `torch.save`. Scripts look for the name that they gave, and read the file with `torch.load`.

    Objects are refused: a pickle with objects is read by running what it says.
    """
    _encoded(path, values)
    files = Files()
    with files.replacing(path) as new:
        torch.save(values, new)
        if names := set(get_unsafe_globals_in_checkpoint(new)) - _MORE:
            raise CheckpointError(
                f"{path.name} would hold a {min(names)}, which is neither a plain value nor a tensor"
            )
        files.sync_file(new)


def _encoded(path: Path, values: Any) -> tuple[Any, dict[str, Tensor]]:
    """`values` split into JSON and tensors. Raises CheckpointError, with the file and the place of the value, for one
    that is neither a tensor nor plain.
    """
    try:
        return encode(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not written: {error}") from None


def _save_nest(path: Path, values: Any) -> None:
    files = Files()
    tree, found = _encoded(path, values)
    text = strict_json.dump(tree, path.name)
    with contextlib.ExitStack() as stack:
        if found:
            beside = path.with_suffix(_TENSORS)
            if beside.exists() and not _beside_values(beside, files):
                raise CheckpointError(
                    f"{path} is not written: its tensors would replace {beside.name}, which was not written beside it. "
                    "Save under another name"
                )
            new = stack.enter_context(files.replacing(beside))
            # transformers reads a file with metadata only if these name a format.
            metadata = {"format": "pt", _DIGEST: hashlib.sha256(text).hexdigest()}
            write_tensors(new, found, metadata, files=files)
        # Both are written before one of them is renamed.
        files.write(stack.enter_context(files.replacing(path)), [text])


def _beside_values(path: Path, files: Files) -> bool:
    """True if the file was written with values, whose hash it has."""
    with open_tensors(path, files) as tensors:
        return _DIGEST in tensors.metadata


def _load_nest(path: Path) -> Any:
    files, beside = Files(), path.with_suffix(_TENSORS)
    text = files.read(path, strict_json.MAX_JSON_BYTES)
    tree = strict_json.parse(text, str(path))
    # Values without tensors may have replaced such with tensors, or lie beside another file of that name.
    if not beside.exists() or not refers_to_tensors(tree):
        return decode(tree, {})
    with open_tensors(beside, files) as tensors:
        if tensors.metadata.get(_DIGEST) not in (None, hashlib.sha256(text).hexdigest()):
            raise CheckpointError(
                f"{path.name} and {beside.name} are of two saves: one was interrupted before it had replaced both, or "
                f"{path.name} was edited. Use an earlier save"
            )
        return decode(tree, tensors)
