"""The state of an optimizer whose parameters are whole, each on one rank of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names
from windlass.core.module_state import kept_elsewhere
from windlass.core.types import State
from windlass.dist.absent import Held, held
from windlass.dist.gang import current


def is_in_stages(model: nn.Module) -> bool:
    """Return True if each parameter of `model` is whole on one rank, and others have nothing of it."""
    elsewhere = kept_elsewhere(model)
    return elsewhere is not None and elsewhere.in_stages


def joined_state(state: State, model: nn.Module, mark: Any) -> tuple[State, dict[str, Tensor]]:
    """The state of all ranks, from that of this one, with marks in place of tensors; and the tensors by name, of which
    each is on one rank. Collective: every rank returns the same names.

    Args:
        mark: what takes the place of a tensor, by its name.
    """
    all_ranks, owners = current(), _owners(model)
    tensors: dict[str, Tensor] = {}

    def apart(value: Any, path: str) -> Any:
        if isinstance(value, Tensor) and value.dim():
            tensors[path] = value
            return mark(path)
        if isinstance(value, dict):
            return {key: apart(item, f"{path}/{key}") for key, item in value.items()}
        return value.cpu() if isinstance(value, Tensor) else value

    entries = {
        name: apart(entry, name) for name, entry in state["state"].items() if owners[name] == all_ranks.rank
    }
    kinds = {path: [str(value.dtype)[6:], list(value.shape)] for path, value in tensors.items()}
    everywhere = all_ranks.gather_objects([entries, kinds])
    parts: dict[str, Tensor] = {}
    for rank, (_, found) in enumerate(everywhere):
        for path, (dtype, shape) in found.items():
            own = rank == all_ranks.rank
            tensor = tensors[path] if own else torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)
            parts[path] = held(tensor, rank, present=own)
    whole = {name: entry for found, _ in everywhere for name, entry in found.items()}
    return {**state, "state": {name: whole[name] for name in state["shapes"] if name in whole}}, parts


def _owners(model: nn.Module) -> dict[str, int]:
    """The rank that writes each parameter, by canonical name."""
    named = dict(model.named_parameters())
    short, elsewhere = canonical_names(named), kept_elsewhere(model)
    values = {} if elsewhere is None else elsewhere.values
    found = {short[name]: values[parameter] for name, parameter in named.items()}
    return {
        name: value.pieces[0][0] if isinstance(value, Held) and value.pieces else 0
        for name, value in found.items()
    }
