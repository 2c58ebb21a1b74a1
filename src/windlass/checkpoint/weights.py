"""The weights of a model as `model.safetensors`, which `from_pretrained` reads too.

Names are canonical (no wrapper prefixes). Tied weights are written once, under the first name in the state dict; the
metadata of the file maps the others to it. Views that overlap in part are each written in full, and loaded in place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import StoredValues, as_tensors, is_one_tensor
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.names import canonical_names, counted, shorten
from windlass.checkpoint.own_loading import fill_values, hand_over, read_like
from windlass.checkpoint.pretrained import by_names_in_memory, ignored_names
from windlass.checkpoint.tensor_file import TensorSource, nbytes, open_tensors, read_held, write_tensors
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.module_state import (
    bare,
    customizes_state,
    modules_with_extra_state,
    on_device_of,
    state_of,
    state_was_loaded,
)
from windlass.core.tensors import address, distinct
from windlass.dist.sharded import Part, is_in_parts, local, part
from windlass.dist.views import end_of, overlapping

WEIGHTS_NAME = "model.safetensors"
LARGEST_FILE = 50 * 10**9  # bytes of tensors: as in `save_pretrained`, because the Hub takes no larger file
ALIASES_KEY = "windlass.aliases"  # metadata: JSON map of tied name -> name it is stored under
_COMPARED = 1 << 21  # elements that are compared at once
_logger = get_logger(__name__)


def save_weights(
    folder: Path, state_dict: Mapping[str, Any], *, name: str = WEIGHTS_NAME, files: Files | None = None
) -> FileEntry:
    """Write `folder/model.safetensors` from `model.state_dict()`; an existing one stays until the new one is complete.
    `name`: of the file, where it holds other weights than a whole model's.
    """
    stored, aliases = stored_state(state_dict)
    header = with_aliases({"format": "pt"}, aliases)
    files = files or Files()
    with files.replacing(folder / name) as new:
        return write_tensors(new, stored, header, files=files)


def with_aliases(metadata: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The metadata with the map of tied names, if any."""
    said = {ALIASES_KEY: json.dumps(aliases, sort_keys=True)} if aliases else {}
    return {**metadata, **said}


def weights_bytes(state_dict: Mapping[str, Any]) -> int:
    """Bytes that `save_weights` will write, without the header."""
    stored, _ = stored_state(state_dict)
    return sum(nbytes(tensor) for tensor in stored.values())


def is_split(name: str, state: Mapping[str, Any]) -> bool:
    """Return True if the weights `state` are too large for one file `name`, so that they are written as several."""
    return name.rpartition("/")[2] == WEIGHTS_NAME and len(state) > 1 and weights_bytes(state) > LARGEST_FILE


def split_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store by name, and the map of other names to the stored one with the same memory."""
    first: dict[Any, str] = {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        kept = first.setdefault(_memory_key(tensor, name), name)
        if kept == name:
            stored[name] = tensor
        else:
            aliases[name] = kept
    return stored, aliases


def _memory_key(tensor: Tensor, name: str) -> Any:
    """Equal for two tensors if they are the same view of the same memory."""
    if is_in_parts(tensor) or tensor.is_meta:
        return id(tensor)  # a rank's part may be empty, without memory
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return name  # no shared memory; what cannot be saved is refused later by name
    return (
        tensor.device,
        address(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        # Lazy views: other values in the same memory.
        tensor.is_conj(),
        tensor.is_neg(),
    )


def stored_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state dict by canonical names, and the map of tied names (see `split_aliases`)."""
    names = canonical_names(state)
    return split_aliases(as_tensors({names[name]: value for name, value in state.items()}))


def load_weights(source: Path, model: nn.Module, *, files: Files | None = None) -> None:
    """Copy the weights of a file (or of `source/model.safetensors`) into `model`, in place, so that ties and
    devices stay. Of a sharded parameter every rank takes its part.

    Everything is checked before anything is written. A dtype that differs is converted, with a warning. Raises
    CheckpointError for names missing or unexpected, shapes that differ (the first few of each and how many), weights
    apart in the file that the model ties, or a damaged file.
    """
    path = source / WEIGHTS_NAME if source.is_dir() else source
    with open_tensors(path, files or Files()) as file:
        aliases = read_aliases(path, file.metadata)
        fill(path, file, aliases, model)


def fill(path: Path, file: TensorSource, aliases: Mapping[str, str], model: nn.Module) -> None:
    """Load `model` from any source, with the checks of `load_weights`. Reads this rank's part of one tensor at a time.

    Args:
        path: names the source in errors.
        aliases: tied name -> the name that it is stored under.
    """
    module = bare(model)
    state, extra = state_of(module), modules_with_extra_state(module)
    names = canonical_names(state)
    # Entries that are values, of any shape, which are not filled in place.
    raw = {short: name for name, short in names.items() if name in extra or not is_one_tensor(state[name])}
    values = StoredValues(file, frozenset(raw))
    tensors = by_names_in_memory(values.others(), frozenset(names.values()), module)
    targets: dict[str, Tensor] = {short: state[name] for name, short in names.items() if short not in raw}
    derived = {short for short in ignored_names(module) if short not in tensors}
    targets = {short: tensor for short, tensor in targets.items() if short not in derived}
    sources = _match(tensors, aliases, targets)
    resized = _resized(module, names, tensors, targets, sources)
    kept = {short: tensor for short, tensor in targets.items() if short not in resized}
    _check_values(path, values.names, raw.keys())
    _check(path, tensors, targets, sources, resized)
    _check_ties(path, tensors, targets, sources)
    _check_overlaps(path, tensors, kept, sources)
    stored, _ = split_aliases(targets)
    changed = [name for name in stored if tensors.dtype(sources[name]) != stored[name].dtype]
    if changed:
        _logger.warning("%d weights change dtype as they are loaded: %s", len(changed), shorten(changed))
    # Before the first weight is written: what cannot be read leaves the model unchanged.
    read = {name: on_device_of(state[name], values.read(short)) for short, name in raw.items()}
    if customizes_state(module):
        own = {
            name: read_like(
                tensors.read(sources[short], part(state[name]) if short in kept else None), state[name]
            )
            for name, short in names.items()
            if short in targets
        }
        hand_over(path, module, own | read)
        return
    with torch.no_grad():
        for name, tensor in stored.items():
            mine = local(tensor)
            # torch refuses to write in place to what `expand` has repeated.
            distinct(mine).copy_(distinct(read_held(tensors, sources[name], tensor), mine))
    fill_values(path, module, read)
    state_was_loaded(module)


def _match(file: TensorSource, aliases: Mapping[str, str], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """The stored name for each name of the model. A tied name that is not stored has that of its twin."""
    sources = {name: aliases.get(name, name) for name in targets}
    _, twins = split_aliases(targets)
    groups = {name: [name] for name in targets if name not in twins}
    for name, kept in twins.items():
        groups[kept].append(name)
    for group in groups.values():
        stored = next((sources[name] for name in group if sources[name] in file), None)
        if stored is not None:
            sources.update({name: stored for name in group if sources[name] not in file})
    return sources


def read_aliases(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """The map of tied names to stored ones, which `save_weights` writes into the metadata of a file."""
    text = metadata.get(ALIASES_KEY)
    if text is None:
        return {}
    if not isinstance(text, str):
        raise CheckpointError(f"the alias map of {path} is not a map of names")
    aliases = strict_json.parse(text.encode(), f"the alias map of {path}")
    if not (isinstance(aliases, dict) and all(isinstance(kept, str) for kept in aliases.values())):
        raise CheckpointError(f"the alias map of {path} is not a map of names")
    return aliases


def _resized(
    module: nn.Module,
    names: Mapping[str, str],
    file: TensorSource,
    targets: Mapping[str, Tensor],
    sources: Mapping[str, str],
) -> frozenset[str]:
    """Names of the tensors, parameters excluded, whose shape differs in the file and is left to the module's own way to
    load its state, which is compared with the file afterwards.
    """
    if not customizes_state(module):
        return frozenset()
    parameters = {names.get(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return frozenset(
        name
        for name, tensor in targets.items()
        if name not in parameters
        and not is_in_parts(tensor)
        and sources[name] in file
        and file.shape(sources[name]) != tuple(tensor.shape)
    )


def _check(
    path: Path,
    file: TensorSource,
    targets: Mapping[str, Tensor],
    sources: Mapping[str, str],
    resized: AbstractSet[str],
) -> None:
    shapes = {
        name: file.shape(sources[name]) if name in resized else tuple(tensor.shape)
        for name, tensor in targets.items()
    }
    problems = misfits(file, shapes, sources, "model")
    if problems:
        raise CheckpointError(f"{path} does not fit this {len(targets)}-tensor model: {problems}")
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise CheckpointError(
            f"the model has {len(on_meta)} tensors on the meta device, which cannot take weights: {shorten(on_meta)}"
        )


def _check_values(path: Path, stored: AbstractSet[str], wanted: AbstractSet[str]) -> None:
    missing, unexpected = sorted(wanted - stored), sorted(stored - wanted)
    if problems := counted((missing, "missing in the file"), (unexpected, "that the model does not have")):
        raise CheckpointError(f"{path} does not fit the extra state of this model: {problems}")


def misfits(
    file: TensorSource, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, str], owner: str
) -> str:
    """Why the tensors of a file do not fit tensors of these shapes, as text; empty if they do.

    Args:
        sources: the name in the file of each of them.
        owner: of the tensors, for the text ("model").
    """
    used = set(sources.values())
    wrong = [
        f"{name} is {list(file.shape(source))} in the file and {list(shapes[name])} in the model"
        for name, source in sources.items()
        if source in file and file.shape(source) != shapes[name]
    ]
    return counted(
        ((name for name, source in sources.items() if source not in file), "missing in the file"),
        ((name for name in file.names if name not in used), f"that the {owner} does not have"),
        (wrong, "of another shape"),
    )


def _check_ties(
    path: Path, file: TensorSource, targets: Mapping[str, Tensor], sources: Mapping[str, str]
) -> None:
    """Refuse different values for tied weights: the last one would silently replace the others."""
    _, twins = split_aliases(targets)
    for name, kept in twins.items():
        mine, other = sources[name], sources[kept]
        if mine != other and not _same_values(file, mine, other):
            raise CheckpointError(
                f"{path} has different values for {name!r} and {kept!r}, which this model ties together"
            )


def _same_values(file: TensorSource, one: str, other: str) -> bool:
    """Compare some rows at a time: tensors may not fit into memory."""
    shape = file.shape(one)
    if not shape:
        return _equal(file.read(one), file.read(other))
    at_once = max(_COMPARED // max(math.prod(shape[1:]), 1), 1)
    for start in range(0, shape[0], at_once):
        rows = Part((start, *(0,) * (len(shape) - 1)), (min(at_once, shape[0] - start), *shape[1:]))
        if not _equal(file.read(one, rows), file.read(other, rows)):
            return False
    return True


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare by value; NaN equals itself."""
    same = (one == other) | ((one != one) & (other != other))
    return bool(same.all())


def _check_overlaps(
    path: Path, file: TensorSource, targets: Mapping[str, Tensor], sources: Mapping[str, str]
) -> None:
    """Refuse different values for memory that views share, by a test in memory of the same layout."""
    for names in overlapping(split_aliases(targets)[0]):
        views = {name: targets[name].detach() for name in names}
        begin = min(view.storage_offset() for view in views.values())
        scratch = torch.empty(max(map(end_of, views.values())) - begin, dtype=views[names[0]].dtype)
        copies = {
            name: scratch.as_strided(view.shape, view.stride(), view.storage_offset() - begin)
            for name, view in views.items()
        }
        for name, copy in copies.items():
            copy.copy_(file.read(sources[name]))
        for name, copy in copies.items():
            if not _equal(copy, file.read(sources[name]).to(copy.dtype)):
                raise CheckpointError(
                    f"{path} has different values for {shorten(names)}, which share memory in this model"
                )
