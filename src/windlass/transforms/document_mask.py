"""Which tokens of packed rows see which: the documents of the rows, and what within each is not simply causal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Where the documents of a packed row begin, for kernels; positions that start again show the same.
BORDERS = frozenset({"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


class DocumentMask(NamedTuple):
    """What the layers of a model get instead of a mask.

    Attributes:
        lengths: tokens of each document of all rows, in order.
        masks: for each document None if its attention is causal, else which keys a query sees: bool, (queries, keys).
        prefixes: for each document the number of an earlier one, and how many of its first tokens come before this
            one's own keys; None: no document has any.
        borders: where the documents begin in the flattened rows, and the end of the last one, on their device: int32.
            It is made with the mask, once a forward, because every layer's kernel takes it. None: no kernel computes
            these masks.
    """

    lengths: list[int]
    masks: list[Tensor | None]
    prefixes: list[tuple[int, int]] | None = None
    borders: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether each document is causal attention of its own tokens and no more."""
        return self.prefixes is None and not any(mask is not None for mask in self.masks)

    def with_prefixes(self, documents: Sequence[Tensor]) -> Sequence[Tensor]:
        """The keys or values of documents, (1, tokens, heads, size), after those of their prefixes."""
        if self.prefixes is None:
            return documents
        return [
            torch.cat([documents[first][:, :tokens], own], dim=1) if tokens else own
            for own, (first, tokens) in zip(documents, self.prefixes, strict=True)
        ]


def document_borders(function: Callable[..., Any], rows: int, length: int, device: Any) -> Tensor | None:
    """Borders of the stretches in which each token sees the one before it, as `DocumentMask` has them; None if some
    token sees the one after it.
    """
    row = torch.arange(rows, device=device)[:, None]
    head = torch.zeros_like(row)
    earlier = torch.arange(length - 1, device=device)[None]
    later = earlier + 1
    # Neighbours show the borders; all pairs of tokens would be the mask of the row, which is to be avoided.
    if seen(function, row, head, earlier, later, (rows, length - 1)).any():
        return None
    joined = seen(function, row, head, later, earlier, (rows, length - 1))
    starts = torch.cat([torch.ones_like(joined[:, :1]), ~joined], dim=1).flatten().nonzero().flatten()
    return with_end(starts, rows * length)


def with_end(starts: Tensor, end: int) -> Tensor:
    """Where documents begin, and the end of the last one: int32, as kernels take them."""
    return torch.nn.functional.pad(starts, (0, 1), value=end).int()


def document_starts(positions: Tensor) -> Tensor:
    """Where documents begin in rows whose positions start again: places in the flattened rows, int64."""
    again = positions[:, 1:] <= positions[:, :-1]
    return torch.nn.functional.pad(again, (1, 0), value=True).flatten().nonzero().flatten()


def masks_of(
    function: Callable[..., Any], lengths: list[int], length: int, device: Any
) -> list[Tensor | None]:
    """The mask of each document that is more than causal: its last token does not see its first one."""
    sizes = torch.tensor(lengths, device=device)
    ends = sizes.cumsum(0)
    rows, starts = (ends - sizes) // length, (ends - sizes) % length
    whole = seen(function, rows, torch.zeros_like(rows), starts + sizes - 1, starts, sizes.shape).tolist()
    places = [range(start, start + size) for start, size in zip(starts.tolist(), lengths, strict=True)]
    return [
        None if causal else mask_between(function, row, own, own, device)
        for causal, row, own in zip(whole, rows.tolist(), places, strict=True)
    ]


def mask_between(function: Callable[..., Any], row: int, queries: range, keys: range, device: Any) -> Tensor:
    """Which of these queries of a row see which of these keys: bool, (queries, keys)."""
    at = torch.full((1, 1), row, device=device)
    first, second = (torch.arange(r.start, r.stop, device=device) for r in (queries, keys))
    return seen(function, at, torch.zeros_like(at), first[:, None], second[None], (len(queries), len(keys)))


def seen(function: Callable[..., Any], row: Any, head: Any, query: Any, key: Any, shape: Any) -> Tensor:
    """Which queries see which keys: bool of `shape`. Indices are broadcast."""
    return torch.as_tensor(function(row, head, query, key)).expand(shape)
