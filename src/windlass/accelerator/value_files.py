"""Single files of a script: tensors and plain values, as safetensors and JSON under whatever name it gives."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import decode, encode, has_references
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import open_tensors, write_tensors
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.logs import get_logger, warn_once

_log = get_logger(__name__)
_TENSORS, _VALUES = ".safetensors", ".json"
# In the header of the tensors: the hash of the values that were saved with them. Two files cannot be replaced in one
# instant, and tensors of one save beside values of another would be read without an error.
_DIGEST = "values_sha256"


def on_this_machine(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a file or folder outside of checkpoints. Raises ConfigError for a URL."""
    if is_url(path):
        fix = "is remote, where checkpoints alone can be written; use a folder of this machine"
        raise ConfigError(Problem("folder", os.fspath(path), fix))
    return Path(path).expanduser().absolute()


def warn_if_unsafe(safe_serialization: bool) -> None:
    """Warn once that `safe_serialization=False` is mapped to True."""
    if not safe_serialization:
        warn_once(_log, "safe_serialization=False has no effect: safetensors are written, never pickle")


def save_values(path: Path, values: Any) -> None:
    """Write `values` by the ending of `path`. Raises CheckpointError for values that cannot be saved; they are named.

    Args:
        path: ".safetensors" takes a dict of tensors. ".json" takes a nest of plain values, whose tensors go to a
            safetensors file of the same name. Any other ending, such as ".pt", means pickle, which is never written:
            ".json" is appended to the name, with one warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == _TENSORS:
        _save_tensors(path, values)
    elif path.suffix == _VALUES:
        _save_nest(path, values)
    else:
        _save_nest(_beside(path, _VALUES), values)
        warn_once(
            _log,
            f"pickle is never written: {path} is saved as {path.name}{_VALUES}, with its tensors in "
            f"{path.name}{_TENSORS}. windlass.utils.load({path.name!r}) reads them, torch.load does not",
        )


def load_values(path: Path) -> Any:
    """Read what `save_values` wrote under this name, with tensors on the host. Raises CheckpointError if there is no
    such file, or another program wrote it.
    """
    if path.suffix == _TENSORS:
        with open_tensors(path, Files()) as tensors:
            return {name: tensors.read(name) for name in tensors.names}
    if path.suffix == _VALUES:
        return _load_nest(path)
    place = _beside(path, _VALUES)
    if place.exists():
        return _load_nest(place)
    raise CheckpointError(
        f"{path} was not written by Windlass, for there is no {place.name}; of other files only .safetensors are read: "
        "reading a pickle can run any code"
    )


def _save_tensors(path: Path, tensors: Any) -> None:
    """Write a dict of tensors as a safetensors file; tensors that share memory are written once for each name. Raises
    CheckpointError if it is not a dict of tensors.
    """
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path.name} holds a dict of tensors; end the name in .json for anything else")
    files = Files()
    with files.replacing(path) as new:
        write_tensors(new, dict(tensors), {"format": "pt"}, files=files)


def _save_nest(path: Path, values: Any) -> None:
    files = Files()
    tree, found = encode(values)
    text = strict_json.dump(tree, path.name)
    with contextlib.ExitStack() as stack:
        if found:
            new = stack.enter_context(files.replacing(path.with_suffix(_TENSORS)))
            # transformers reads a file with metadata only if these name a format.
            metadata = {"format": "pt", _DIGEST: hashlib.sha256(text).hexdigest()}
            write_tensors(new, found, metadata, files=files)
        # Both are written before one of them is renamed.
        files.write(stack.enter_context(files.replacing(path)), [text])


def _load_nest(path: Path) -> Any:
    files, beside = Files(), path.with_suffix(_TENSORS)
    text = files.read(path, strict_json.MAX_JSON_BYTES)
    tree = strict_json.parse(text, str(path))
    # Values without tensors may have replaced such with tensors, or lie beside another file of that name.
    if not beside.exists() or not has_references(tree):
        return decode(tree, {})
    with open_tensors(beside, files) as tensors:
        if tensors.metadata.get(_DIGEST) not in (None, hashlib.sha256(text).hexdigest()):
            raise CheckpointError(
                f"{path.name} and {beside.name} are of two saves: one was interrupted before it had replaced both, or "
                f"{path.name} was edited. Use an earlier save"
            )
        return decode(tree, tensors)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
