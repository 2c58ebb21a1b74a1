"""Decoders of transformers on sequences that are divided among ranks: their attention, and their batches.

The layers of such a model get this rank's tokens alone, and everything but attention is computed on them. What
attention needs to know of the whole rows travels as an argument of the forward, so that it is there when a layer is
computed again in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require
from windlass.transforms.document_attention import DocumentMask, document_attention, document_mask
from windlass.transforms.evaluating import evaluating
from windlass.transforms.neftune import vocabulary_of
from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.ulysses import refuse_heads, ulysses_attention
from windlass.transforms.zigzag import Zigzag

NAME = "windlass_divided"
_IGNORED = -100
_KNOWN = {"input_ids", "labels", "attention_mask", "position_ids"}


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of one batch, and how they are attended.

    Attributes:
        method: "ring" or "ulysses".
        group: the ranks that have the parts.
        zigzag: which rank has which tokens.
        documents: of all tokens of the rows; see `Sight`.
    """

    method: Literal["ring", "ulysses"]
    group: Any
    zigzag: Zigzag
    documents: Tensor | None


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


@contextlib.contextmanager
def sequences_divided(model: Any, method: Literal["ring", "ulysses"], group: Any) -> Iterator[None]:
    """Within the context `model` can be run on divided batches (`divide`); its attention is restored at the end.

    Batches that are not divided give the same results as before. Collective: a short row is run both ways.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
        ModelError: the attention of the model cannot be replaced, or its logits on divided rows differ.
    """
    transformers = require("transformers", "divide sequences among ranks")
    if not isinstance(model, transformers.PreTrainedModel) or not model._can_set_attn_implementation():
        raise ModelError(
            f"{type(model).__name__} has an attention that cannot be replaced, so its sequences cannot be divided "
            "among ranks. Train it with cp_size=1 and sp_size=1."
        )
    config = model.config.get_text_config()
    if method == "ulysses":
        heads = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        refuse_heads(heads, keys, dist.get_world_size(group))
    before = config._attn_implementation
    expected = _probe(model, None, group)
    transformers.AttentionInterface.register(NAME, divided_attention)
    transformers.AttentionMaskInterface.register(NAME, divided_mask)
    model.set_attn_implementation(NAME)
    try:
        _refuse_difference(model, expected, _probe(model, method, group), group)
        yield
    finally:
        model.set_attn_implementation(before)


def divide(
    batch: dict[str, Tensor], method: Literal["ring", "ulysses"], group: Any, padding: int = 0
) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of `group` have: the arguments of a forward.

    Rows are padded to a multiple of twice the number of ranks. Labels are shifted before rows are divided, so that the
    last token of a part has the first one of the next as its target. The loss of the forward is a mean over this
    rank's targets, unless `num_items_in_batch` is given: with the count of the whole rows, the losses of the ranks add
    up to the loss of the batch.

    Args:
        batch: `input_ids`, and perhaps `labels`, `attention_mask` and `position_ids`, shape (rows, tokens). Positions
            that start again begin a document.
        padding: the token for padding.

    Raises:
        ConfigError: the batch has further columns.
    """
    unknown = sorted(set(batch) - _KNOWN)
    if unknown:
        fix = f"cannot be divided among ranks, only {', '.join(sorted(_KNOWN))}: remove them"
        raise ConfigError(Problem("batch", unknown, fix))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ids = batch["input_ids"]
    length = ids.shape[1]
    missing = -length % (2 * size)
    zigzag = Zigzag(size, length + missing)
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=ids.device)
    positions = positions.expand(ids.shape[0], -1)
    documents = _documents(positions, batch.get("attention_mask"), "position_ids" in batch)
    if documents is not None:
        documents = nn.functional.pad(documents, (0, missing), value=-1)
    part = {
        "input_ids": zigzag.part(nn.functional.pad(ids, (0, missing), value=padding), rank),
        "position_ids": zigzag.part(nn.functional.pad(positions, (0, missing)), rank),
        "divided": Division(method, group, zigzag, documents),
        "use_cache": False,
    }
    if "labels" in batch:
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, missing + 1), value=_IGNORED)
        part["labels"] = part["shift_labels"] = zigzag.part(targets, rank)
    return part


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
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(extra) or f'attention dropout {dropout}'}, which attention "
            "on divided sequences does not have. Set attention_dropout=0, or train with cp_size=1 and sp_size=1."
        )
    attend = ring_attention if divided.method == "ring" else ulysses_attention
    sight = Sight(divided.zigzag, divided.documents, attention_mask.window)
    return attend(query, key, value, sight, divided.group, scaling).transpose(1, 2).contiguous(), None


def _probe(model: Any, method: Literal["ring", "ulysses"] | None, group: Any) -> Tensor:
    """This rank's logits of a short row, run whole if there is no `method`, else divided."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    device = next(model.parameters()).device
    ids = torch.arange(6 * size, device=device)[None] * 3 % (vocabulary_of(model) or 16)
    with evaluating(model):
        if method is not None:
            logits: Tensor = model(**divide({"input_ids": ids}, method, group)).logits
            return logits
        return Zigzag(size, ids.shape[1]).part(model(input_ids=ids, use_cache=False).logits, rank)


def _refuse_difference(model: Any, expected: Tensor, got: Tensor, group: Any) -> None:
    difference, scale = (got - expected).abs().max(), expected.abs().max()
    differs = (~(difference <= 64 * torch.finfo(expected.dtype).eps * scale)).int()
    # All ranks raise if one does: else the others would wait for it.
    dist.all_reduce(differs, group=group)
    if differs.item():
        raise ModelError(
            f"{type(model).__name__} computes other logits on divided sequences: they differ by "
            f"{difference:.2g} on this rank (logits up to {scale:.2g}). Its layers mix tokens outside of attention, or "
            "compute in a lower precision. Train it with cp_size=1 and sp_size=1."
        )
