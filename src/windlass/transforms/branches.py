"""Rows in which several documents share a prefix: a prompt is computed once for all of its answers.

A row is made of groups: a prefix, and branches that come after it. A token of a branch sees the prefix and the earlier
tokens of its own branch, and none of another branch or group, as if each branch stood alone after a copy of the prefix.
Positions of a branch continue those of the prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.transforms.document_mask import DocumentMask, mask_between, seen
from windlass.transforms.evaluating import evaluating, vocabulary_of

# Of each group: the tokens of the prefix, and those of each branch.
Groups = Sequence[Sequence[int]]


class BranchedRow:
    """The groups of one row, from which a forward's masks are made.

    Args:
        groups: for each the tokens of its prefix (0: it has none), and of each branch, in the order of the row.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.tokens = sum(map(sum, groups))
        self.is_read = False

    def mask(self, function: Callable[..., Any], device: Any, *, own_pattern: bool) -> DocumentMask:
        """The mask of one kind of layer.

        Args:
            function: which key a query sees, by batch, head and their indices in a sequence that stands alone.
            own_pattern: the model has a pattern of its own, which need not be one of indices.

        Raises:
            ModelError: it has.
        """
        if own_pattern:
            raise ModelError("a mask of the model's own cannot be divided into branches")
        self.is_read = True
        lengths: list[int] = []
        masks: list[Tensor | None] = []
        prefixes: list[tuple[int, int]] = []
        for prefix, *branches in self._groups:
            first = len(lengths)
            for number, branch in enumerate(branches):
                # The first branch is one document with the prefix, whose keys come before those of the others.
                shared = prefix if number else 0
                masks.append(_mask(function, shared, prefix + branch, device))
                lengths.append(prefix + branch - shared)
                prefixes.append((first, shared))
        return DocumentMask(lengths, masks, prefixes)


_current: ContextVar[BranchedRow | None] = ContextVar("windlass_branched_row", default=None)


@contextlib.contextmanager
def branched_row(groups: Groups) -> Iterator[None]:
    """Within the body, forwards of one row of as many tokens as the groups have see its groups.

    The model must be in `documents_apart(model, branched=True)`, until the backward of the forward is done.

    Raises:
        ModelError: no forward did.
    """
    row = BranchedRow(groups)
    token = _current.set(row)
    try:
        yield
    finally:
        _current.reset(token)
    # Only without another error, which this one would hide.
    if not row.is_read:
        raise ModelError(
            "the model did not request the mask of a row with shared prompts, so answers would see each other. Train "
            "it with padding_free=False."
        )


def current_row(rows: int, tokens: int) -> BranchedRow | None:
    """The row that is being computed, if it has this shape."""
    row = _current.get()
    return row if row is not None and (rows, tokens) == (1, row.tokens) else None


def _mask(function: Callable[..., Any], first: int, tokens: int, device: Any) -> Tensor | None:
    """Which of `tokens` keys the queries from `first` on see; None if they are all queries, and attention is causal."""
    if not first and _sees_all(function, tokens):
        return None
    return mask_between(function, 0, range(first, tokens), range(tokens), device)


def _sees_all(function: Callable[..., Any], tokens: int) -> bool:
    """True if the last token sees the first one. Evaluated on the host, which does not wait for the device; False if
    the function needs what is on the device.
    """
    row = torch.zeros(1, dtype=torch.int64)
    try:
        return bool(seen(function, row, row, row + tokens - 1, row, (1,)).item())
    except RuntimeError:
        return False


# --- whether a model computes such a row as it computes the sequences alone ------------------------------------------

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
    logits: Tensor = (outputs["logits"] if isinstance(outputs, dict) else outputs.logits)[0]
    return logits.float() if logits.dtype in _LOW else logits
