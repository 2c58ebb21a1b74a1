"""Weights in several files of limited size with an index, as `from_pretrained` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from windlass.checkpoint.deferred import Shaped
from windlass.checkpoint.files import Files
from windlass.checkpoint.names import canonical_names
from windlass.checkpoint.replacing import replacing
from windlass.checkpoint.tensor_file import check_tensor, stream_tensors
from windlass.checkpoint.weights import ALIASES_KEY, WEIGHTS_NAME, stored_state

SPLIT_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SPLIT_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_split(
    folder: Path,
    state: Mapping[str, Any],
    limit: int,
    files: Files | None = None,
    offloaded: Callable[[str], Tensor] | None = None,
) -> list[str]:
    """Write a state dict into `folder`, as one file or as several of at most `limit` bytes of tensors each.

    A tensor that is larger by itself has a file of its own. Files of an earlier, differently split save are removed
    once the new ones are complete.

    Args:
        offloaded: reads the data of a tensor that is on the meta device, by its name in `state`; one at a time.

    Returns:
        The names of the files that hold tensors.
    """
    files = files or Files()
    files.ensure_folder(folder)
    stored, aliases = stored_state(state)
    long = {short: name for name, short in canonical_names(state).items()}

    def read(name: str) -> Tensor:
        tensor = stored[name]
        return offloaded(long[name]).to(tensor.dtype) if offloaded and tensor.is_meta else tensor

    for name, tensor in stored.items():
        if not (offloaded and tensor.is_meta):
            check_tensor(tensor, name)
    shaped = {name: Shaped(tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    written = stream_split(folder, shaped, read, aliases, limit, files)
    _remove_others(folder, written, files)
    return written


def stream_split(
    folder: Path,
    shaped: Mapping[str, Shaped],
    read: Callable[[str], Tensor],
    aliases: Mapping[str, str],
    limit: int,
    files: Files,
) -> list[str]:
    """Write tensors that are made one by one, by `read`, as one file or as several with an index; return their names.

    Args:
        aliases: tied name -> the name that it is stored under.
    """
    parts = _parts(shaped, limit)
    if len(parts) < 2:
        _write_part(folder, WEIGHTS_NAME, shaped, read, with_aliases({"format": "pt"}, aliases), files)
        return [WEIGHTS_NAME]
    places: dict[str, str] = {}
    written = []
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_part(folder, name, {key: shaped[key] for key in part}, read, {"format": "pt"}, files)
        places.update(dict.fromkeys(part, name))
        written.append(name)
    size = {"total_size": sum(tensor.nbytes for tensor in shaped.values())}
    index = {"metadata": {**size, **with_aliases({}, aliases)}, "weight_map": places}
    with replacing(folder / SPLIT_INDEX_NAME, files) as new:
        files.write(new, [json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"])
    return written


def with_aliases(metadata: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The metadata with the map of tied names, if any."""
    said = {ALIASES_KEY: json.dumps(aliases, sort_keys=True)} if aliases else {}
    return {**metadata, **said}


def _parts(shaped: Mapping[str, Shaped], limit: int) -> list[list[str]]:
    """The names in order, in groups of at most `limit` bytes."""
    parts: list[list[str]] = []
    held = 0
    for name, tensor in shaped.items():
        if not parts or held + tensor.nbytes > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += tensor.nbytes
    return parts


def _write_part(
    folder: Path,
    name: str,
    shaped: Mapping[str, Shaped],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    files: Files,
) -> None:
    with replacing(folder / name, files) as new:
        stream_tensors(new, shaped, read, metadata, files=files)


def _remove_others(folder: Path, written: list[str], files: Files) -> None:
    """Remove files of an earlier save, complete or not: a reader would find two sets of weights."""
    single = written == [WEIGHTS_NAME]
    for path in folder.iterdir():
        of_a_split = SPLIT_FILE.fullmatch(path.name.removeprefix("tmp-")) is not None
        stale = of_a_split and path.name not in written
        if stale or path.name == (SPLIT_INDEX_NAME if single else WEIGHTS_NAME):
            files.remove_file(path)
