"""Decoders of transformers on sequences that are divided among ranks: their attention, and their batches.

The layers of such a model get this rank's tokens alone, and everything but attention is computed on them. What
attention needs to know of the whole rows travels as an argument of the forward, so that it is there when a layer is
computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.tensors import autocast_dtype
from windlass.core.types import IGNORED
from windlass.dist.gang import Gang
from windlass.transforms.document_attention import document_attention, document_mask
from windlass.transforms.document_mask import DocumentMask
from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.ulysses import ulysses_attention
from windlass.transforms.zigzag import Zigzag

NAME = "windlass_divided"


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of one batch, and how they are attended."""

    ring: Any  # the ranks among which keys and values travel; None if that is one
    heads: Any  # the ranks that exchange heads; None if that is one
    # Which rank has which tokens. Ranks that exchange heads have neighbouring parts.
    zigzag: Zigzag
    documents: Tensor | None  # of all tokens of the rows; see `Sight`
    real: Tensor  # which of this rank's tokens are not padding, shape (rows, tokens of a part)
    longest: Tensor  # the largest position in the whole rows, a scalar

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """See `ring_attention`. Under autocast in its dtype, as PyTorch's attention: some norms of queries give
        float32, which would travel in twice the bytes.
        """
        dtype = autocast_dtype(query)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        parts = 1 if self.ring is None else dist.get_world_size(self.ring)
        sight = Sight(Zigzag(parts, self.zigzag.length), self.documents, window)
        if self.heads is None:
            return ring_attention(query, key, value, sight, self.ring, scale)
        return ulysses_attention(query, key, value, sight, self.heads, self.ring, scale)


class DividedMask:
    """What the layers of a model get instead of a mask.

    Args:
        window: the number of latest keys that a query sees in this kind of layer; None for all.
        make: makes the mask for rows that are not divided.
    """

    def __init__(self, window: int | None, make: Callable[[], DocumentMask | Tensor | None]) -> None:
        self.window, self._make = window, make

    @cached_property
    def whole(self) -> DocumentMask | Tensor | None:
        """The mask for rows that are not divided, as in generation."""
        return self._make()


def divide(batch: Mapping[str, Any], context_ranks: Gang) -> dict[str, Any]:
    """This rank's part of a batch that all `context_ranks` have: the arguments of a forward.

    Rows are padded to a multiple of twice the number of ranks. Labels are shifted before rows are divided, so that the
    last token of a part has the first one of the next as its target. The loss of the forward is this rank's sum divided
    by `num_items_in_batch`, or else by the targets of the whole batch: the losses of the ranks add up to that of the
    batch.

    Args:
        batch: `input_ids`, and perhaps `labels` or `shift_labels`, `attention_mask` and `position_ids`, shape
            (rows, tokens); `num_items_in_batch`. Positions that start again begin a document.
    """
    size, rank = context_ranks.size, context_ranks.rank
    ring, heads = (group_of(context_ranks.over(view)) for view in ("ring", "heads"))
    ids, length = batch["input_ids"], batch["input_ids"].shape[1]
    missing = -length % (2 * size)
    zigzag = Zigzag(size, length + missing)
    given = batch.get("position_ids")
    positions = torch.arange(length, device=ids.device) if given is None else given
    positions = positions.expand(ids.shape[0], -1)
    documents = _documents(positions, batch.get("attention_mask"), given is not None)
    if documents is not None:
        documents = nn.functional.pad(documents, (0, missing), value=-1)
    mask = batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    real = zigzag.part(nn.functional.pad(real, (0, missing)), rank)
    part = {
        "input_ids": zigzag.part(nn.functional.pad(ids, (0, missing)), rank),
        "position_ids": zigzag.part(nn.functional.pad(positions, (0, missing)), rank),
        "divided": Division(ring, heads, zigzag, documents, real, positions.max()),
        "use_cache": False,
    }
    # Shifted here: the target of the last token of a part is in the part of another rank.
    targets = batch.get("shift_labels")
    if targets is None and batch.get("labels") is not None:
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if targets is not None:
        count = batch.get("num_items_in_batch")
        part["num_items_in_batch"] = (targets != IGNORED).sum().clamp(min=1) if count is None else count
        targets = zigzag.part(nn.functional.pad(targets, (0, missing), value=IGNORED), rank)
        part["shift_labels"] = targets
        if batch.get("labels") is not None:
            part["labels"] = targets
    return part


def group_of(context_ranks: Gang) -> Any:
    """The process group in which they exchange activations; None for a rank alone."""
    return None if context_ranks.size == 1 else context_ranks.device_group or dist.group.WORLD


def _documents(positions: Tensor, mask: Tensor | None, packed: bool) -> Tensor | None:
    """The document of each token; None if nothing but positions within one document is known."""
    if not packed and mask is None:
        return None
    again = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    documents = again.cumsum(1) if packed else torch.zeros_like(positions)
    return documents if mask is None else documents.masked_fill(mask == 0, -1)


def divided_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **options: Any
) -> DividedMask:
    """The mask of a forward, as transformers requests it once for each kind of layer."""
    make = partial(document_mask, batch_size, q_length, kv_length, mask_function, **options)
    return DividedMask(options.get("local_size"), make)


def divided_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DividedMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    divided: Division | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it; see `document_attention`, which attends rows that are not divided.

    Raises:
        ModelError: the layer asks for what attention on divided rows does not have.
    """
    if divided is None:
        mask = attention_mask.whole if isinstance(attention_mask, DividedMask) else attention_mask
        return document_attention(module, query, key, value, mask, dropout, scaling, **kwargs)
    if not isinstance(attention_mask, DividedMask):
        raise ModelError(
            f"{type(module).__name__} makes a mask of its own, so its sequences cannot be divided among ranks. Train "
            "it with cp_size=1 and sp_size=1."
        )
    extra = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if dropout or extra:
        fix = "Train" if extra else "Set attention_dropout=0, or train"
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(extra) or f'attention dropout {dropout}'}, which attention "
            f"on divided sequences does not have. {fix} with cp_size=1 and sp_size=1."
        )
    attended = divided.attend(query, key, value, attention_mask.window, scaling)
    return attended.transpose(1, 2).contiguous(), None
