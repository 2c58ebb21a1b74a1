"""Parameters that are tied: find the names of one parameter, and tie them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.transforms.module_tensors import owner_of, put_tensor


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Groups of names that are one parameter, each sorted, e.g. `[["embedding.weight", "head.weight"]]`.

    Parameters count as tied when they are the same object, so that it works on the meta device too.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names (see `find_tied_parameters`) one parameter again: the first that has data."""
    for group in tied_params:
        params = [getattr(*owner_of(model, name)) for name in group]
        kept = next((param for param in params if not param.is_meta), None)
        if kept is not None:
            for name in group:
                put_tensor(model, name, kept)
