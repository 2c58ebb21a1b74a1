"""Conversion of `torch.optim.Optimizer.state_dict()`, which numbers parameters, into a state by names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.names import canonical_names, shorten
from windlass.checkpoint.optimizer_state import IMPLEMENTATION
from windlass.compat.readers.stored_tensor import StoredTensor
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.types import State

Division = list[list[str]]  # the parameters' names, by group
_RATES = frozenset({"lr", "initial_lr"})
# Options that depend on the version of torch and do not identify an optimizer.
_OF_VERSIONS = frozenset({"params", "param_names", "maximize", "decoupled_weight_decay"})
_logger = get_logger(__name__)


def named_state(
    path: Path,
    tree: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    divisions: Iterable[Division],
    with_rates: bool,
) -> State:
    """The state for `optimizer_state.load_optimizer_state`, with `StoredTensor`s for tensors.

    The options of a group are the saved ones if all its parameters had the same. If they had not (some decayed and
    others did not), those of `optimizer` are kept, with a warning. Raises CheckpointError if the file does not have
    such a state, or one of another optimizer or other parameters.

    Args:
        path, tree: the file and its content.
        divisions: possible groups of the parameters; the first that fits the file is used.
    """
    groups, entries = _parts(path, tree)
    short = canonical_names(dict(model.named_parameters()))
    shapes = {short[name]: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    canonical = [[[short[name] for name in names] for names in one if names] for one in divisions]
    names = _fitting(path, groups, entries, shapes, canonical)
    numbers = {
        number: name
        for group, members in zip(groups, names, strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    present = _present_groups(optimizer, model, short)
    _check_kind(path, groups[0], optimizer.param_groups[0])
    saved = {name: group for group, members in zip(groups, names, strict=True) for name in members}
    ignored = frozenset({"params", "param_names"} | (frozenset() if with_rates else _RATES))
    return {
        "shapes": {name: list(shapes[name]) for members in present for name in members},
        "state": {numbers[number]: entry for number, entry in entries.items()},
        "groups": [
            {"names": members, "options": _options(members, saved, ignored, path)} for members in present
        ],
    }


def _parts(path: Path, tree: Any) -> tuple[list[dict[str, Any]], dict[Any, dict[Any, Any]]]:
    groups, entries = (
        (tree.get("param_groups"), tree.get("state")) if isinstance(tree, dict) else (None, None)
    )
    if not isinstance(groups, list) or not isinstance(entries, dict):
        raise CheckpointError(f"{path} does not hold the state of an optimizer: param_groups and state")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointError(f"{path} is malformed: a group lists no parameters")
    groups = [group for group in groups if group["params"]]  # e.g. if all parameters decay
    numbers = [number for group in groups for number in group["params"]]
    if not numbers or not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
        raise CheckpointError(f"{path} is malformed: parameters are not numbered, or one comes twice")
    if not entries.keys() <= set(numbers) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CheckpointError(f"{path} is malformed: there is state of a parameter that is in no group")
    return groups, entries


def _fitting(
    path: Path,
    groups: list[dict[str, Any]],
    entries: dict[Any, dict[Any, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    divisions: list[Division],
) -> Division:
    """The first division whose groups have the saved sizes and whose parameters have the saved shapes."""
    sizes = [len(group["params"]) for group in groups]
    wrong: list[str] = []
    for division in divisions:
        if [len(members) for members in division] != sizes:
            continue
        wrong = [
            f"{name} is {list(shapes[name])}"
            for group, members in zip(groups, division, strict=True)
            for number, name in zip(group["params"], members, strict=True)
            if not _may_belong(entries.get(number, {}), shapes[name])
        ]
        if not wrong:
            return division
    why = f"; of another shape: {shorten(wrong)}" if wrong else ""
    known = " or ".join(str([len(members) for members in division]) for division in divisions)
    raise CheckpointError(
        f"{path} is the state of an optimizer with groups of {sizes} parameters, which this model does not have in "
        f"that order (its groups: {known}){why}. Build model and optimizer as they were when it was saved"
    )


def _may_belong(entry: Mapping[Any, Any], shape: tuple[int, ...]) -> bool:
    """Return True if all tensors have the shape of the parameter or of its mean over one of the last two axes, or are
    one number.
    """
    allowed = {shape, shape[:-1], (*shape[:-2], *shape[-1:])}
    tensors = [value for value in entry.values() if isinstance(value, StoredTensor)]
    return all(tensor.shape in allowed or tensor.shape in ((), (1,)) for tensor in tensors)


def _present_groups(optimizer: torch.optim.Optimizer, model: nn.Module, short: Mapping[str, str]) -> Division:
    names = {id(parameter): short[name] for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def _check_kind(path: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that the saved options are those of this optimizer; its name is not saved."""
    other = (saved.keys() ^ present.keys()) - _RATES - _OF_VERSIONS - IMPLEMENTATION
    if other:
        here, there = (sorted(other & group.keys()) for group in (present, saved))
        raise CheckpointError(
            f"{path} is the state of another optimizer than this run's: it has the options {there}, and this one "
            f"{here}. Set optim to the one that it was saved with"
        )


def _options(
    members: list[str], saved: Mapping[str, Mapping[str, Any]], ignored: frozenset[str], path: Path
) -> dict[str, Any]:
    """The saved options that all of `members` have in common."""
    first = saved[members[0]] if members else {}
    options = {}
    for key, value in first.items():
        differing = [name for name in members if key not in ignored and saved[name].get(key) != value]
        if differing:
            _logger.warning(
                "%s has another %s for some parameters of one group than for the others; this run's own holds for all "
                "of them (%s)",
                path,
                key,
                shorten(differing),
            )
        elif key not in ignored:
            options[key] = value
    return options
