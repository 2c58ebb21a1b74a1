"""Weights in several files with an index, as `from_pretrained` reads them, where one would grow too large."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from windlass.checkpoint.files import Files
from windlass.checkpoint.names import canonical_names
from windlass.checkpoint.tensor_file import nbytes, write_tensors
from windlass.checkpoint.weights import ALIASES_KEY, WEIGHTS_NAME, save_weights, split_aliases

SPLIT_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
_SPLIT_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_split(
    folder: Path, state: Mapping[str, Tensor], limit: int, files: Files | None = None
) -> list[str]:
    """Write a state dict into `folder`, as one file or as several of at most `limit` bytes of tensors each.

    A tensor that is larger by itself has a file of its own. Files of an earlier, differently split save are removed
    once the new ones stand.

    Returns:
        The names of the files that hold tensors.

    Raises:
        CheckpointError: an entry is not a plain dense tensor; it is named.
    """
    files = files or Files()
    files.ensure_folder(folder)
    names = canonical_names(state)
    stored, aliases = split_aliases({names[name]: tensor for name, tensor in state.items()})
    parts = _parts(stored, limit)
    if len(parts) < 2:
        save_weights(folder, state, files=files)
        written = [WEIGHTS_NAME]
    else:
        written = _write_parts(folder, parts, stored, aliases, files)
    _remove_others(folder, written, files)
    return written


def _parts(stored: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The names in order, cut wherever a file would grow beyond the limit."""
    parts: list[list[str]] = []
    held = 0
    for name, tensor in stored.items():
        size = nbytes(tensor)
        if not parts or held + size > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _write_parts(
    folder: Path,
    parts: list[list[str]],
    stored: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    files: Files,
) -> list[str]:
    places: dict[str, str] = {}
    written = []
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        new = folder / f"tmp-{name}"
        write_tensors(new, {key: stored[key] for key in part}, {"format": "pt"}, files=files)
        files.rename(new, folder / name)
        places.update(dict.fromkeys(part, name))
        written.append(name)
    metadata: dict[str, object] = {"total_size": sum(nbytes(tensor) for tensor in stored.values())}
    if aliases:
        metadata[ALIASES_KEY] = json.dumps(aliases, sort_keys=True)
    index = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
    new = folder / f"tmp-{SPLIT_INDEX_NAME}"
    files.write(new, [index.encode() + b"\n"])
    files.rename(new, folder / SPLIT_INDEX_NAME)
    return written


def _remove_others(folder: Path, written: list[str], files: Files) -> None:
    """What an earlier save left: a reader would find two sets of weights."""
    single = written == [WEIGHTS_NAME]
    for path in folder.iterdir():
        stale = _SPLIT_FILE.fullmatch(path.name) is not None and path.name not in written
        if stale or path.name == (SPLIT_INDEX_NAME if single else WEIGHTS_NAME):
            files.remove_file(path)
