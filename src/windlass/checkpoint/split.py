"""Weights in several files of limited size with an index, as `from_pretrained` reads them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.names import canonical_names
from windlass.checkpoint.tensor_file import Shaped, check_tensor, stream_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME, stored_state, with_aliases

SPLIT_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SPLIT_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_split(
    folder: Path,
    state: Mapping[str, Any],
    limit: int,
    files: Files | None = None,
    offloaded: Callable[[str], Tensor] | None = None,
) -> dict[str, FileEntry]:
    """Write a state dict into `folder`, as one file or as several of at most `limit` bytes of tensors each.

    A tensor that is larger by itself has a file of its own. Files of an earlier, differently split save are removed
    once the new ones are complete.

    Args:
        offloaded: reads the data of a tensor that is on the meta device, by its name in `state`; one at a time.

    Returns:
        The files that were written, the index included, by name.
    """
    files = files or Files()
    files.ensure_folder(folder)
    stored, aliases = stored_state(state)
    long = {short: name for name, short in canonical_names(state).items()}

    def read(name: str) -> Tensor:
        tensor = stored[name]
        return offloaded(long[name]).to(tensor.dtype) if offloaded and tensor.is_meta else tensor

    # All of them before the first file is written.
    for name, tensor in stored.items():
        if not (offloaded and tensor.is_meta):
            check_tensor(tensor, name)
    shaped = {name: Shaped(tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    written = stream_split(folder, shaped, read, aliases, limit, files)
    for name in left_over([path.name for path in folder.iterdir()], written):
        files.remove_file(folder / name)
    return written


def stream_split(
    folder: Path,
    shaped: Mapping[str, Shaped],
    read: Callable[[str], Tensor],
    aliases: Mapping[str, str],
    limit: int,
    files: Files,
) -> dict[str, FileEntry]:
    """Write tensors that are made one by one, by `read`, as one file or as several with an index; return all files.
    `aliases`: tied name -> the name that it is stored under.
    """
    parts = _parts(shaped, limit)
    if len(parts) < 2:
        metadata = with_aliases({"format": "pt"}, aliases)
        with files.replacing(folder / WEIGHTS_NAME) as new:
            return {WEIGHTS_NAME: stream_tensors(new, shaped, read, metadata, files=files)}
    places: dict[str, str] = {}
    written: dict[str, FileEntry] = {}
    index = folder / SPLIT_INDEX_NAME
    with contextlib.ExitStack() as renames:
        # First, so that it is renamed last: a reader that finds the index finds all files that it lists.
        new_index = renames.enter_context(files.replacing(index))
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            new = renames.enter_context(files.replacing(folder / name))
            held = {key: shaped[key] for key in part}
            written[name] = stream_tensors(new, held, read, {"format": "pt"}, files=files)
            places.update(dict.fromkeys(part, name))
        size = {"total_size": sum(tensor.nbytes for tensor in shaped.values())}
        tree = {"metadata": {**size, **with_aliases({}, aliases)}, "weight_map": places}
        text = json.dumps(tree, indent=2, sort_keys=True).encode() + b"\n"
        written[SPLIT_INDEX_NAME] = files.write(new_index, [text])
        # Files of an earlier save may have the same names. All are written before the first is replaced, and until the
        # last is, no index joins files of both.
        if index.exists():
            files.remove_file(index)
    return written


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


def left_over(names: Iterable[str], written: Collection[str]) -> list[str]:
    """The files among `names` that an earlier save of the weights left, complete or not, in the folder where they are
    now in the files `written`: a reader would find two sets of weights.
    """
    of_model = (WEIGHTS_NAME, SPLIT_INDEX_NAME)
    if not any(name in written for name in of_model):
        return []
    return [
        name
        for name in names
        if name not in written and (name in of_model or SPLIT_FILE.fullmatch(name.removeprefix("tmp-")))
    ]
