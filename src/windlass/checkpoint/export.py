"""A checkpoint's tensors for other programs: as one safetensors file, or as a folder for `from_pretrained`.

One tensor at a time is in host memory. The result is written under a temporary name, so it is complete if it exists.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from windlass.checkpoint.codec import is_of_value
from windlass.checkpoint.files import CHUNK, FileEntry, Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.split import SPLIT_FILE, SPLIT_INDEX_NAME, stream_split
from windlass.checkpoint.store import is_checkpoint
from windlass.checkpoint.stored import (
    Folder,
    StoredTensors,
    find_weights,
    further_models,
    open_optimizer,
    open_weights,
    optimizer_stem,
)
from windlass.checkpoint.tensor_file import Shaped, stream_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME, with_aliases
from windlass.core.errors import CheckpointError
from windlass.core.locations import working_folder
from windlass.core.logs import get_logger
from windlass.core.tensors import dtype_name

_logger = get_logger(__name__)
MAX_SHARD_SIZE = 5 * 10**9  # bytes of tensors
_CONFIG = "config.json"
# Further files for `from_pretrained`: configurations, tokenizer or processor. Their code is in `_code_of`.
_COMPANIONS = (
    _CONFIG,
    "generation_config.json",
    ADAPTER_CONFIG,
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "*vocab*.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    # Of tokenizers of few models: Marian, PhoBERT, Whisper, GPT-NeoX-Japanese, BARTpho, RoCBert
    "*.spm",
    "bpe.codes",
    "normalizer.json",
    "emoji.json",
    "dict.txt",
    "word_shape.json",
    "word_pronunciation.json",
    "chat_template*",
    "*processor*.json",
    "README.md",
    "LICENSE*",
)
# Folders beside them: chat templates that have names, and tokenizers of a processor that has several.
_INSIDE = re.compile(r"additional_chat_templates|\w+_tokenizer(?:/additional_chat_templates)?")
_MAX_CODE_BYTES = 1 << 24
# As transformers finds what a module needs from beside it.
_BESIDE = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)
_Converted = tuple[StoredTensors, dict[str, Shaped], Callable[[str], Tensor]]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    # Of the model, or of the optimizer's state (`PARAMETER/KEY`)
    tensors: Literal["model", "optimizer"] = "model"
    # Floating-point tensors are converted to it; counters of the optimizer and a module's extra state stay as they are
    dtype: torch.dtype | None = None
    max_shard_size: int = MAX_SHARD_SIZE  # bytes of tensors in one file of a folder
    force: bool = False  # whether an earlier result may be replaced


def model_files(source: Folder, weights: str | None = None) -> list[str] | None:
    """Names of the files in a folder that are the model, as `from_pretrained` reads them; None if its weights are in
    another form, so that only an export has such files. `weights`: their file, by default what `find_weights` finds.
    """
    weights = weights or find_weights(source)
    if weights == SPLIT_INDEX_NAME:
        found = [name for name in source.names if name == weights or SPLIT_FILE.fullmatch(name)]
    elif weights in (WEIGHTS_NAME, ADAPTER_WEIGHTS):
        found = [weights]
    else:
        return None
    return sorted({*found, *_companions(source, weights)})


def export_file(
    source: Folder, target: Path, options: ExportOptions, files: Files | None = None
) -> FileEntry:
    """Write the tensors of `source` as the one file `target`; return its size and hash. Names that are tied are in its
    metadata.
    """
    files = files or Files()
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; name a file")
    if target.exists() and not options.force:
        raise CheckpointError(f"{target} is there already; name another, or replace it with --force")
    if target.exists() and is_checkpoint(target.parent):
        raise CheckpointError(f"{target} is a file of a checkpoint, so it is not replaced; name another")
    files.ensure_folder(target.parent)
    with files.replacing(target) as new, _converted(source, options) as (tensors, shaped, read):
        metadata = with_aliases({"format": "pt"}, tensors.aliases)
        entry = stream_tensors(new, shaped, read, metadata, files=files)
    files.sync_folder(target.parent)
    return entry


def export_folder(
    source: Folder,
    target: Path,
    options: ExportOptions,
    files: Files | None = None,
    finish: Callable[[Path, Files], None] = lambda folder, files: None,
) -> None:
    """Write the weights of `source`, their configuration and tokenizer into the folder `target`. `finish` may change
    the complete folder before it has that name; what it writes must be durable.
    """
    files = files or Files()
    with whole_folder(target, files, lambda: _check_place(target, options)) as new:
        if (weights := find_weights(source)) != ADAPTER_WEIGHTS:
            with _converted(source, options) as (tensors, shaped, read):
                stream_split(new, shaped, read, tensors.aliases, options.max_shard_size, files)
        else:
            export_file(source, new / ADAPTER_WEIGHTS, options, files)
        for name in _companions(source, weights):
            files.ensure_folder((new / name).parent)
            _copy(source, name, new / name, options, files)
        for folder in sorted(path for path in new.rglob("*") if path.is_dir()):
            files.sync_folder(folder)
        finish(new, files)


@contextmanager
def whole_folder(target: Path, files: Files, check: Callable[[], None]) -> Iterator[Path]:
    """Yield a new folder, which gets the name `target` after the body, or is removed after an error. What is written
    into it must be durable. Raises CheckpointError if `target` holds the working directory.

    Args:
        check: raises CheckpointError if what is at `target` must not be replaced.
    """
    target = target.resolve()  # where a link leads is filled, and the link kept
    # Programs that run in it, as the shell does, would be in a folder that no longer exists.
    if Path(working_folder()).is_relative_to(target):
        raise CheckpointError(f"{target} is in use as the working directory: name a new folder")
    # First: an interrupted export may have left the folder that is checked next under its temporary name.
    _recover(target, files)
    check()
    files.ensure_folder(target.parent)
    # Not `tmp-NAME`, which may be a folder of the user's: what is there is removed.
    new = target.with_name(f"tmp-unfinished-{target.name}")
    if new.exists():
        files.remove_tree(new)
    files.make_folder(new)
    try:
        yield new
        files.sync_folder(new)
        _put(new, target, files)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_tree(new)
        raise


def _check_place(target: Path, options: ExportOptions) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not options.force:
        raise CheckpointError(f"{target} is there already; name another, or replace it with --force")
    if not _is_result(target):
        raise CheckpointError(
            f"{target} is not a folder that an export wrote, so it is not replaced; choose another"
        )


def _is_result(target: Path) -> bool:
    """Return True if a folder has only files that an export may write."""
    if not target.is_dir() or target.is_symlink():
        return False
    weights = (WEIGHTS_NAME, ADAPTER_WEIGHTS, SPLIT_INDEX_NAME)
    entries = [path for path in target.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = {path.relative_to(target).as_posix() for path in entries}
    return (
        not names.isdisjoint(weights)
        and all(entry.is_file() for entry in entries)
        and all(
            name in weights
            or SPLIT_FILE.fullmatch(name)
            or _is_companion(name)
            or (name.endswith(".py") and "/" not in name)
            for name in names
        )
    )


def _companions(source: Folder, weights: str) -> list[str]:
    """Names of the files in a folder that belong to the model besides its `weights`."""
    found = list(filter(_is_companion, source.names))
    if weights != ADAPTER_WEIGHTS and ADAPTER_CONFIG in found:
        # With that of an adapter which was saved there earlier, `from_pretrained` would look for its weights.
        found.remove(ADAPTER_CONFIG)
    return sorted({*found, *_code_of(source, found)})


def _code_of(source: Folder, companions: Iterable[str]) -> set[str]:
    """Names of the modules in a folder that a configuration names in its `auto_map`, and of those that they import from
    beside them. Other Python files, such as a script's, are not the model's.
    """
    waiting: list[str] = []
    for name in companions:
        if name.endswith(("config.json", "processor.json")):
            waiting += _named_modules(strict_json.read(source.path / name, source.files, allow_nan=True))
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in source and name not in found:
            found.add(name)
            text = source.files.read(source.path / name, _MAX_CODE_BYTES).decode("utf-8", "replace")
            waiting += _BESIDE.findall(text)
    return found


def _named_modules(configuration: Any) -> Iterator[str]:
    """Modules in `auto_map` (`{"AutoModel": "module.Class"}`; of tokenizers a list, of which one may be None)."""
    entries = configuration.get("auto_map") if isinstance(configuration, dict) else None
    for entry in entries.values() if isinstance(entries, dict) else ():
        for reference in entry if isinstance(entry, list) else [entry]:
            # "OWNER/NAME--module.Class" is another repository's.
            if isinstance(reference, str) and "--" not in reference:
                yield reference.partition(".")[0]


def _is_companion(name: str) -> bool:
    folder, _, name = name.rpartition("/")
    if folder and not _INSIDE.fullmatch(folder):
        return False
    is_template = folder.endswith("additional_chat_templates")
    return name.endswith(".jinja") if is_template else any(fnmatch(name, one) for one in _COMPANIONS)


def _put(new: Path, target: Path, files: Files) -> None:
    """Rename the complete folder. A folder that it replaces is removed afterwards."""
    old = _aside(target)
    if target.exists():
        # A rename does not replace a folder that has entries. If the process ends between the two, `_recover`
        # undoes this.
        files.rename(target, old)
    try:
        files.rename(new, target)
    except OSError:
        if old.exists():
            files.rename(old, target)
        raise
    files.sync_folder(target.parent)
    if old.exists():
        files.remove_tree(old)


def _aside(target: Path) -> Path:
    return target.with_name(f"tmp-replaced-{target.name}")


def _recover(target: Path, files: Files) -> None:
    """Restore the folder that an interrupted export renamed."""
    old = _aside(target)
    if old.exists():
        if target.exists():
            files.remove_tree(old)
        else:
            files.rename(old, target)


@contextmanager
def _converted(source: Folder, options: ExportOptions) -> Iterator[_Converted]:
    """The tensors to export, with their dtypes and shapes in the result, and a function that reads one."""
    if options.tensors == "optimizer":
        opened = open_optimizer(source, optimizer_stem(source))
    else:
        opened = open_weights(source)
        if further := further_models(source):
            _logger.warning(
                "%s holds %d models, and this is the first: the others are exported from the folders %s in it",
                source.path,
                1 + len(further),
                shorten(further),
            )
    with opened as tensors:
        shaped = {name: _shaped_as(tensors, name, options) for name in tensors.names}
        yield tensors, shaped, lambda name: tensors.read(name).to(shaped[name].dtype)


def _shaped_as(tensors: StoredTensors, name: str, options: ExportOptions) -> Shaped:
    found = tensors.shaped(name)
    counts = options.tensors == "optimizer" and not found.shape
    if options.dtype is None or counts or is_of_value(name) or not found.dtype.is_floating_point:
        return found
    return Shaped(options.dtype, found.shape)


def _copy(source: Folder, name: str, target: Path, options: ExportOptions, files: Files) -> None:
    if name == _CONFIG and options.dtype is not None:
        files.write(target, [_config_as(source, options.dtype)])
        return
    with source.files.reading(source.path / name) as file:
        files.write(target, iter(lambda: file.read(CHUNK), b""))


def _config_as(source: Folder, dtype: torch.dtype) -> bytes:
    """The configuration with the dtype of the weights, which `from_pretrained` uses."""
    path = source.path / _CONFIG
    config = strict_json.read(path, source.files, allow_nan=True)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a map")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    text = json.dumps({**config, key: dtype_name(dtype)}, indent=2)
    return text.encode() + b"\n"
