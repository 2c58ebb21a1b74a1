"""What every rank must have alike, compared before anything depends on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from windlass.core.errors import RankMismatchError
from windlass.core.redact import is_secret_name
from windlass.core.tensors import dtype_name
from windlass.dist.differences import differences
from windlass.dist.gang import Gang


def check_alike(facts: Mapping[str, Any], gang: Gang) -> None:
    """Raise on every rank if `facts` differ between ranks. Collective.

    Ranks exchange one hash; the values travel only if the hashes differ. Raises RankMismatchError, which names each
    field that differs, with its values and their ranks.

    Args:
        facts: values by field name. Mappings inside are compared key by key, as `field.key`.
    """
    if gang.size == 1:
        return
    values = as_texts(facts)
    # Sorted: ranks that have the same may have gathered it in another order.
    digest = hashed(json.dumps(sorted(values.items())))
    if len(set(gang.gather_objects(digest))) == 1:
        return
    raise RankMismatchError(differences(gang.gather_objects(values)))


def as_texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts by name, `field.key` of mappings inside, as texts that are the same in every process for equal values. Of a
    secret it is the hash.
    """
    return dict(_flat("", facts))


def model_facts(module: nn.Module) -> dict[str, str]:
    """The parameters of a model as facts to compare: shape, dtype, and whether each is trained."""
    return {name: _parameter(p) for name, p in module.named_parameters()}


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The groups of an optimizer as facts to compare: their options, and how many parameters each holds."""
    groups = {
        f"group {number}": {
            "parameters": len(group["params"]),
            **{name: value for name, value in group.items() if name not in ("params", "param_names")},
        }
        for number, group in enumerate(optimizer.param_groups)
    }
    return {"class": type(optimizer).__name__, "number of groups": len(groups), **groups}


def _parameter(parameter: nn.Parameter) -> str:
    kind = dtype_name(parameter.dtype)
    return f"{kind}{list(parameter.shape)}{'' if parameter.requires_grad else ' frozen'}"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, hashed(_text(value)) if is_secret_name(path) and value is not None else _text(value)


def hashed(text: str) -> str:
    """The SHA-256 of a text: equal secrets are recognised by it without being shown."""
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: Any) -> str:
    """What is compared of a value: the same in every process for values that are equal."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value.value if isinstance(value, Enum) else value)
    if isinstance(value, torch.Tensor):
        # A learning rate may be a tensor. What a sharded one holds here is another part than elsewhere.
        return repr(value.item()) if value.numel() == 1 else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return type(value).__qualname__  # an object's repr may hold its address
