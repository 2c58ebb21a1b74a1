"""A model's weights as `model.safetensors`, which `from_pretrained` reads too.

Names are canonical (no wrapper prefixes). Tensors that are the same memory seen the same way (tied weights) are
written once, under the first name in the state dict's order; the file's metadata maps the others to it. Views
that only overlap are written each in full, and rewritten in place on load.
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
from windlass.checkpoint.deferred import TensorSource
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.model_values import StoredValues, as_tensors, is_plain
from windlass.checkpoint.names import canonical_names, shorten
from windlass.checkpoint.own_loading import fill_values, hand_over, read_like
from windlass.checkpoint.replacing import replacing
from windlass.checkpoint.tensor_file import nbytes, open_tensors, write_tensors
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.module_state import (
    bare,
    customizes_state,
    modules_with_extra_state,
    on_device_of,
    state_of,
)
from windlass.core.tensors import distinct
from windlass.dist.sharded import Part, is_sharded, local, part
from windlass.dist.views import end_of, overlapping

WEIGHTS_NAME = "model.safetensors"
ALIASES_KEY = "windlass.aliases"  # metadata: JSON map of tied name -> name it is stored under
_COMPARED = 1 << 21  # elements that are compared at once
_logger = get_logger(__name__)


def save_weights(
    folder: Path,
    state_dict: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    name: str = WEIGHTS_NAME,
    files: Files | None = None,
) -> FileEntry:
    """Write `folder/model.safetensors` from `model.state_dict()`; an existing one stays until the new one is complete.

    Args:
        metadata: extra strings for the file's header; `format` and the alias map are added.
        name: of the file, where it holds other weights than a whole model's.

    Raises:
        CheckpointError: an entry is not a plain dense tensor; it is named.
    """
    stored, aliases = stored_state(state_dict)
    header = {**(metadata or {}), "format": "pt"}
    if aliases:
        header[ALIASES_KEY] = json.dumps(aliases, sort_keys=True)
    files = files or Files()
    with replacing(folder / name, files) as new:
        return write_tensors(new, stored, header, files=files)


def weights_bytes(state_dict: Mapping[str, Any]) -> int:
    """How many bytes `save_weights` will write, its header aside."""
    stored, _ = stored_state(state_dict)
    return sum(nbytes(tensor) for tensor in stored.values())


def split_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store by name, and the map of each further name to the stored one it equals in memory."""
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
    """Equal for two tensors exactly when they are the same memory, seen the same way."""
    if is_sharded(tensor):
        return id(tensor)  # a rank's part may be empty, and then lies nowhere
    if tensor.is_meta:
        return id(tensor)
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return name  # no memory to share; what cannot be saved is refused later, by name
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def stored_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Of a state dict, the tensors to store under canonical names, and the map of tied names (see `split_aliases`).

    Raises:
        CheckpointError: an entry can be stored neither as a tensor nor as a value (see `model_values`).
    """
    names = canonical_names(state)
    return split_aliases(as_tensors({names[name]: value for name, value in state.items()}))


def load_weights(source: Path, model: nn.Module, *, files: Files | None = None) -> None:
    """Copy the weights of a file (or of `source/model.safetensors`) into `model`, in place, so that ties and
    devices stay. Of a sharded parameter every rank takes its part.

    Everything is checked before anything is written. A dtype that differs is converted, with a warning.

    Raises:
        CheckpointError: names missing or unexpected, shapes that differ (the first few of each and how many),
            weights apart in the file that the model ties, or a damaged file.
    """
    path = source / WEIGHTS_NAME if source.is_dir() else source
    with open_tensors(path, files or Files()) as file:
        aliases = read_aliases(path, file.metadata)
        fill(path, file, aliases, model)


def fill(path: Path, file: TensorSource, aliases: Mapping[str, str], model: nn.Module) -> None:
    """Load `model` from any source, with the checks of `load_weights`. Of one tensor after another this rank's part is
    read, and nothing else.

    Args:
        path: names the source in errors.
        aliases: tied name -> the name that it is stored under.
    """
    module = bare(model)
    state, extra = state_of(module), modules_with_extra_state(module)
    names = canonical_names(state)
    # Entries that are values: of any shape, and not to be copied into.
    raw = {short: name for name, short in names.items() if name in extra or not is_plain(state[name])}
    values = StoredValues(file, frozenset(raw))
    tensors = values.others()
    targets: dict[str, Tensor] = {short: state[name] for name, short in names.items() if short not in raw}
    sources = _match(tensors, aliases, targets)
    _check_values(path, values.names, raw.keys())
    _check(path, tensors, targets, sources)
    _check_ties(path, tensors, targets, sources)
    _check_overlaps(path, tensors, targets, sources)
    stored, _ = split_aliases(targets)
    changed = [name for name in stored if tensors.dtype(sources[name]) != stored[name].dtype]
    if changed:
        _logger.warning("%d weights change dtype as they are loaded: %s", len(changed), shorten(changed))
    read = {name: on_device_of(state[name], values.read(short)) for short, name in raw.items()}
    if customizes_state(module):
        own = {name: read_like(tensors.read(sources[short], part(state[name])), state[name])
               for name, short in names.items() if short in targets}  # fmt: skip
        hand_over(path, module, own | read)
        return
    with torch.no_grad():
        for name, tensor in stored.items():
            mine = local(tensor)
            distinct(mine).copy_(distinct(tensors.read(sources[name], part(tensor)), mine))
    fill_values(path, module, read)


def _match(file: TensorSource, aliases: Mapping[str, str], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Which stored tensor each of the model's names takes. A tied name that is not stored takes its twin's."""
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
    """The map of tied names to those they are stored under, which `save_weights` leaves in the metadata of a file.

    Raises:
        CheckpointError: it is malformed; `path` is named.
    """
    text = metadata.get(ALIASES_KEY)
    if text is None:
        return {}
    if not isinstance(text, str):
        raise CheckpointError(f"the alias map of {path} is not a map of names")
    aliases = strict_json.parse(text.encode(), f"the alias map of {path}")
    if not (isinstance(aliases, dict) and all(isinstance(kept, str) for kept in aliases.values())):
        raise CheckpointError(f"the alias map of {path} is not a map of names")
    return aliases


def _check(path: Path, file: TensorSource, targets: Mapping[str, Tensor], sources: Mapping[str, str]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    problems = misfits(file, shapes, sources, "model")
    if problems:
        raise CheckpointError(f"{path} does not fit this {len(targets)}-tensor model: {problems}")
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise CheckpointError(
            f"the model has {len(on_meta)} tensors on the meta device, which cannot take weights: {shorten(on_meta)}"
        )


def _check_values(path: Path, stored: AbstractSet[str], wanted: AbstractSet[str]) -> None:
    problems = []
    if missing := sorted(wanted - stored):
        problems.append(f"{len(missing)} missing in the file: {shorten(missing)}")
    if unexpected := sorted(stored - wanted):
        problems.append(f"{len(unexpected)} that the model does not have: {shorten(unexpected)}")
    if problems:
        raise CheckpointError(f"{path} does not fit the extra state of this model: {'; '.join(problems)}")


def misfits(
    file: TensorSource, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, str], owner: str
) -> str:
    """What keeps a file from filling tensors of these shapes, in words; empty where nothing does.

    Args:
        sources: which tensor of the file each of them takes.
        owner: what they belong to ("model").
    """
    missing = [name for name, source in sources.items() if source not in file]
    used = set(sources.values())
    unexpected = [name for name in file.names if name not in used]
    wrong = [
        f"{name} is {list(file.shape(source))} in the file and {list(shapes[name])} in the model"
        for name, source in sources.items()
        if source in file and file.shape(source) != shapes[name]
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing in the file: {shorten(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} that the {owner} does not have: {shorten(unexpected)}")
    if wrong:
        problems.append(f"{len(wrong)} of another shape: {shorten(wrong)}")
    return "; ".join(problems)


def _check_ties(
    path: Path, file: TensorSource, targets: Mapping[str, Tensor], sources: Mapping[str, str]
) -> None:
    """Two different stored tensors must not go into one: whichever came last would win, silently."""
    _, twins = split_aliases(targets)
    for name, kept in twins.items():
        mine, other = sources[name], sources[kept]
        if mine != other and not _same_values(file, mine, other):
            raise CheckpointError(
                f"{path} has different values for {name!r} and {kept!r}, which this model ties together"
            )


def _same_values(file: TensorSource, one: str, other: str) -> bool:
    """Compared some rows at a time: either may be too large to be held whole."""
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
    """Views that share some of their memory must be given the same values there: tried in memory like theirs."""
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
