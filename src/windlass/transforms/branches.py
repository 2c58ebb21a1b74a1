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
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.transforms.document_mask import DocumentMask, seen

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
    queries = torch.arange(first, tokens, device=device)[:, None]
    keys = torch.arange(tokens, device=device)[None]
    row = torch.zeros((1, 1), dtype=torch.int64, device=device)
    return seen(function, row, row, queries, keys, (tokens - first, tokens))


def _sees_all(function: Callable[..., Any], tokens: int) -> bool:
    """True if the last token sees the first one. Evaluated on the host, which does not wait for the device; False if
    the function needs what is on the device.
    """
    row = torch.zeros(1, dtype=torch.int64)
    try:
        return bool(seen(function, row, row, row + tokens - 1, row, (1,)).item())
    except RuntimeError:
        return False
