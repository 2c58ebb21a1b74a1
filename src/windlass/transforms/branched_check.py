"""Whether a model computes a row with shared prompts as it computes the sequences alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.transforms.branches import branched_row
from windlass.transforms.evaluating import evaluating, vocabulary_of

# Two groups: prompts of several lengths, and one branch as long as possible beside a short one.
_GROUPS = ((5, 3, 6), (3, 4, 1))
_LOW = (torch.float16, torch.bfloat16)
# How far rounding may carry results of the same shape, and of others.
_ALIKE, _RESHAPED, _RESHAPED_LOW = 64, 512, 8


def refuse_unbranched(model: nn.Module) -> None:
    """Raise ModelError if the logits of a row with shared prefixes are not those of its sequences alone, or if those of
    a branch depend on another branch.

    To be called within `documents_apart(model, branched=True)`, on a model that is not yet wrapped or sharded.
    """
    weights = next(model.parameters())
    vocabulary = vocabulary_of(model) or 16
    draw = torch.Generator().manual_seed(0)
    groups = [
        [torch.randint(0, vocabulary, (length,), generator=draw).to(weights.device) for length in group]
        for group in _GROUPS
    ]
    changed = [[prefix, (first + 1) % vocabulary, *others] for prefix, first, *others in groups]
    try:
        with evaluating(model), torch.autocast(weights.device.type, enabled=False):
            together, moved = _in_a_row(model, groups), _in_a_row(model, changed)
            alone = [part for prefix, *branches in groups for part in _alone(model, prefix, branches)]
    except Exception as error:
        raise _refusal(model, f"{type(error).__name__}: {error}") from error
    parts = torch.split(together, [length for group in _GROUPS for length in group])
    others = torch.split(moved, [length for group in _GROUPS for length in group])
    kept = [at for at in range(len(parts)) if at % len(_GROUPS[0]) != 1]
    scale = together.abs().max().item()
    leak = max((parts[at] - others[at]).abs().max().item() for at in kept)
    if not leak <= _ALIKE * torch.finfo(together.dtype).eps * scale:
        raise _refusal(model, f"other tokens in one answer changed logits of the other by {leak:.2g}")
    difference = (together - torch.cat(alone)).abs().max().item()
    factor = _RESHAPED_LOW if weights.dtype in _LOW else _RESHAPED
    if not difference <= factor * torch.finfo(weights.dtype).eps * scale:
        raise _refusal(model, f"logits differ by {difference:.2g} from those without")


def _refusal(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot compute a prompt once for both of its answers ({reason}). Train it with "
        "padding_free=False."
    )


def _in_a_row(model: nn.Module, groups: list[list[Tensor]]) -> Tensor:
    positions = []
    for prefix, *branches in groups:
        positions.append(torch.arange(len(prefix)))
        positions += [torch.arange(len(prefix), len(prefix) + len(branch)) for branch in branches]
    ids = torch.cat([part for group in groups for part in group])[None]
    with branched_row(_GROUPS):
        return _logits(model, ids, torch.cat(positions)[None].to(ids.device))


def _alone(model: nn.Module, prefix: Tensor, branches: list[Tensor]) -> list[Tensor]:
    """The logits of the prefix and of each branch, each sequence by itself."""
    rows = [torch.cat([prefix, branch])[None] for branch in branches]
    found = [_logits(model, ids, torch.arange(ids.shape[1], device=ids.device)[None]) for ids in rows]
    return [found[0][: len(prefix)], *(logits[len(prefix) :] for logits in found)]


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    outputs = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False
    )
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    logits = logits[0]
    return logits.float() if logits.dtype in _LOW else logits
