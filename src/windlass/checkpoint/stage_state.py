"""The state of an optimizer whose parameters each are on the ranks of one stage of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names
from windlass.core.module_state import kept_elsewhere
from windlass.core.tensors import dtype_name
from windlass.core.types import State
from windlass.dist.gang import current
from windlass.dist.sharded import Held, all_holders, blocks_as_lists, blocks_of_lists, is_sharded, part


def is_in_stages(model: nn.Module) -> bool:
    """Return True if each parameter of `model` is on the ranks of one stage, and others have nothing of it."""
    elsewhere = kept_elsewhere(model)
    return elsewhere is not None and elsewhere.in_stages


def joined_state(state: State, model: nn.Module, mark: Any) -> tuple[State, dict[str, Tensor]]:
    """The state of all ranks, from that of this one, with marks in place of tensors; and the tensors by name, of which
    each is on the ranks of a stage. Collective: every rank returns the same names.

    Args:
        mark: what takes the place of a tensor, by its name.
    """
    all_ranks, owners = current(), _owners(model)
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, list[Any]] = {}

    def apart(value: Any, path: str, describes: bool) -> Any:
        if isinstance(value, Tensor) and (value.dim() or is_sharded(value)):
            tensors[path] = value
            if describes:
                blocks = all_holders(value) if is_sharded(value) else [(part(value), [all_ranks.rank])]
                kinds[path] = [dtype_name(value.dtype), list(value.shape), blocks_as_lists(blocks)]
            return mark(path)
        if isinstance(value, dict):
            return {key: apart(item, f"{path}/{key}", describes) for key, item in value.items()}
        # Counters are sent to the other ranks with the entries.
        return value.cpu() if isinstance(value, Tensor) else value

    entries: dict[str, Any] = {}
    for name, entry in state["state"].items():
        if all_ranks.rank in owners[name]:
            describes = all_ranks.rank == owners[name][0]  # the first rank of a stage, for all of them
            marked = apart(entry, name, describes)
            if describes:
                entries[name] = marked
    everywhere = all_ranks.gather_objects([entries, kinds])
    parts: dict[str, Tensor] = {}
    for _, found in everywhere:
        for path, (dtype, shape, lists) in found.items():
            # Memory of one element: only shape and dtype are needed.
            like = torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)
            parts[path] = Held(like, tensors.get(path), blocks_of_lists(lists))
    whole = {name: entry for found, _ in everywhere for name, entry in found.items()}
    return {**state, "state": {name: whole[name] for name in state["shapes"] if name in whole}}, parts


def _owners(model: nn.Module) -> dict[str, list[int]]:
    """The ranks that write each parameter, in ascending order, by canonical name."""
    named = dict(model.named_parameters())
    short, elsewhere = canonical_names(named), kept_elsewhere(model)
    values = {} if elsewhere is None else elsewhere.values
    found: dict[str, list[int]] = {}
    for name, parameter in named.items():
        value = values[parameter]
        blocks = value.blocks if isinstance(value, Held) else []
        found[short[name]] = sorted({rank for _, ranks in blocks for rank in ranks}) or [0]
    return found
