"""Files that a script writes for itself, outside of checkpoints: tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import encode
from windlass.checkpoint.files import Files
from windlass.checkpoint.replacing import replacing
from windlass.checkpoint.tensor_file import write_tensors
from windlass.core.errors import CheckpointError


def save_tensors(path: Path, tensors: Any) -> None:
    """One safetensors file of a dict of tensors; what is the same memory is written once for each name.

    Raises:
        CheckpointError: it is no dict of tensors.
    """
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path.name} holds a dict of tensors; end the name in .json for anything else")
    files = Files()
    with replacing(path, files) as new:
        write_tensors(new, dict(tensors), {"format": "pt"}, files=files)


def save_values(path: Path, values: Any) -> None:
    """A nest of plain values as JSON, and its tensors, where it has any, as the safetensors file of the same name.

    Raises:
        CheckpointError: a value of a type that cannot be saved; its path and type are named.
    """
    files = Files()
    tree, found = encode(values)
    if found:
        with replacing(path.with_suffix(".safetensors"), files) as new:
            write_tensors(new, found, files=files)
    with replacing(path, files) as new:
        files.write(new, [strict_json.dump(tree, path.name)])
