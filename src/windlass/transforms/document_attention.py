"""Attention document by document: the documents of a packed row do not see each other, and no mask of the row is made.

Linear layers run over the whole row; queries, keys and values are split at the borders of documents, each document is
attended by itself, and the results are joined. That costs the square of each document instead of the square of the row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from windlass.core.errors import ModelError
from windlass.core.optional import is_imported, is_older, require
from windlass.transforms.branches import current_row
from windlass.transforms.document_images import images_apart
from windlass.transforms.document_mask import (
    DocumentMask,
    document_borders,
    document_starts,
    masks_of,
    with_end,
)
from windlass.transforms.evaluating import evaluating, short_row, vocabulary_of
from windlass.transforms.varlen_attention import has_kernel, varlen_attention

NAME = "windlass_documents"


@contextlib.contextmanager
def documents_apart(model: nn.Module, *, branched: bool = False) -> Iterator[None]:
    """Within the context `model` keeps the documents of packed rows apart; its attention is restored at the end.

    Args:
        branched: documents may share a prefix, which kernels for documents do not know; see `branches.py`.

    A model whose attention is "eager" or "sdpa" gets `document_attention`; one that was given another keeps it. Rows
    that are not packed give the same results as before. Models that are not of transformers, or have an attention of
    their own, are left as they are: see `refuse_leaks`.
    """
    with contextlib.ExitStack() as stack:
        for part in _models_of_transformers(model):
            _refuse_chunks(part)
            before = part.config._attn_implementation
            chosen = _chosen(part, before, branched)
            if chosen != before:
                part.set_attn_implementation(chosen)
                stack.callback(setattr, part.config, "_attn_implementation", before)
            stack.enter_context(images_apart(part))
        yield


class OwnAttention:
    """The attention that a model has outside `documents_apart`: that of padded rows and of generation, where kernels
    for documents would be compiled for each length.

    Args:
        model: is not in `documents_apart`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = [
            (part.config, part.config._attn_implementation) for part in _models_of_transformers(model)
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the body the model has it, also inside of `documents_apart`."""
        with contextlib.ExitStack() as stack:
            for config, own in self._own:
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = own
            yield


def refuse_leaks(model: nn.Module) -> None:
    """Raise if the logits of one document of a packed row depend on another one.

    Two small documents are run in one row, then again with other tokens in the first one. To be called within
    `documents_apart`, on a model that is not yet wrapped or sharded. Raises ModelError if they do, or if the model
    fails on such a row.
    """
    device = next(model.parameters()).device
    # Of different lengths, so that a border in the wrong place shows.
    lengths = [7, 6]
    first = short_row(model, sum(lengths), device)
    second = first.clone()
    second[:, : lengths[0]] = (second[:, : lengths[0]] + 1) % (vocabulary_of(model) or 16)
    with evaluating(model):
        one, other = (_logits(model, ids, lengths)[:, lengths[0] :] for ids in (first, second))
    # On the host, since MPS has no float64.
    dtype, one, other = one.dtype, one.cpu().double(), other.cpu().double()
    difference = (one - other).abs().max().item()
    scale = one.abs().max().item()
    if not math.isfinite(difference):
        raise ModelError(
            f"{type(model).__name__} returns logits that are not finite for a short row: look at its weights"
        )
    if not difference <= _roundings(model, dtype) * torch.finfo(dtype).eps * scale:
        raise ModelError(
            f"{type(model).__name__} lets documents of a packed row see each other: other tokens in one document "
            f"changed the logits of the next by {difference:.2g} (logits up to {scale:.2g}). Train it without packing "
            "and padding_free; batches of similar lengths (train_sampling_strategy='group_by_length') need little "
            "padding."
        )


def _roundings(model: nn.Module, dtype: torch.dtype) -> float:
    """By how many roundings of the largest logit other kernels may differ. In halves one hides a small leak, so it is
    granted only where the attention is that of this module.
    """
    if dtype.itemsize > 2:
        return 64.0
    return float(any(part.config._attn_implementation == NAME for part in _models_of_transformers(model)))


def _refuse_chunks(model: Any) -> None:
    """Older transformers counts the chunks in which a layer attends (Llama 4) over the row, and not over a document."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    library = require("transformers", "change a model's attention")
    if chunk and is_older(library, "5.23"):
        raise ModelError(
            f"{type(model).__name__} attends in chunks of {chunk} tokens (attention_chunk_size), which transformers "
            f"{library.__version__} counts wrongly in packed rows. Train it without packing and padding_free, or "
            'update: pip install --upgrade "transformers>=5.23"'
        )


def _models_of_transformers(model: nn.Module) -> Iterator[Any]:
    """The outermost models of transformers in `model`, which may be wrapped."""
    if not is_imported("transformers"):
        return
    kind = require("transformers", "change a model's attention").PreTrainedModel
    if isinstance(model, kind):
        yield model
        return
    for child in model.children():
        yield from _models_of_transformers(child)


def _chosen(model: Any, before: str | None, branched: bool) -> str | None:
    """The attention for packed rows."""
    keeps = before not in ("eager", "sdpa") and not branched
    if keeps or not model._can_set_attn_implementation():
        return before
    transformers = require("transformers", "attend document by document")
    transformers.AttentionInterface.register(NAME, document_attention)
    transformers.AttentionMaskInterface.register(NAME, document_mask)
    return NAME


def document_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **options: Any
) -> DocumentMask | Tensor | None:
    """The mask of a forward, as transformers requests it once for each kind of layer. It is a `DocumentMask` if rows
    hold several documents; else what "sdpa" gets.
    """
    from transformers.masking_utils import sdpa_mask

    device = options.get("device", "cpu")
    row = current_row(batch_size, q_length)
    if row is not None:
        return row.mask(mask_function, device, own_pattern=bool(options.get("use_vmap")))
    plain = options.get("attention_mask") is None and not options.get("use_vmap") and q_length == kv_length
    # A step of generation has one query, and no documents.
    if plain and q_length > 1:
        borders = document_borders(mask_function, batch_size, q_length, device)
        # One document in each row is what other masks are for.
        if borders is not None and len(borders) > batch_size + 1:
            lengths = borders.diff().tolist()
            return DocumentMask(lengths, masks_of(mask_function, lengths, q_length, device), borders=borders)
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function, **options
    )


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        query: shape (rows, heads, tokens, size); `key` and `value` may have fewer heads.
        attention_mask: the documents, or a mask for all rows, or None.
        softcap: bound of the scores (Gemma 2).
        s_aux: one more score for each head, for nothing (the sinks of gpt-oss).

    Returns:
        Shape (rows, tokens, heads, size).
    """
    attend, of_row = _Attend(dropout, scaling, softcap, s_aux), isinstance(attention_mask, Tensor)
    if not isinstance(attention_mask, DocumentMask):
        positions = kwargs.get("position_ids") if query.shape[2] == key.shape[2] else None
        attention_mask = _of_documents(attention_mask, kwargs.get("cu_seq_lens_q"), positions, query)
    if not isinstance(attention_mask, DocumentMask):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if softcap is not None or s_aux is not None:
            # One query, as in generation, sees all keys.
            causal = causal and attention_mask is None and query.shape[2] > 1
            return attend(query, key, value, attention_mask, causal), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, "is_causal": causal, **kwargs}
        joined, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return joined, None
    _refuse_unfit(module, query.shape[2], of_row, kwargs.get("position_bias"))
    lengths, borders = attention_mask.lengths, attention_mask.borders
    # One kernel for all documents, which are launched one by one below.
    if borders is not None and attention_mask.is_causal and attend.is_plain and has_kernel(query, key, value):
        return varlen_attention(query, key, value, borders, max(lengths), scaling), None
    queries = _split(query, lengths)
    keys, values = (attention_mask.with_prefixes(_split(states, lengths)) for states in (key, value))
    joined = torch.cat(
        [
            attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, mask is None)
            for q, k, v, mask in zip(queries, keys, values, attention_mask.masks, strict=True)
        ],
        dim=1,
    )
    return joined.reshape(len(query), -1, *joined.shape[2:]), None


def _refuse_unfit(module: Any, tokens: int, of_row: bool, position_bias: Tensor | None) -> None:
    """Raise ModelError for a layer with a position bias, and for one of Llama 4 that computes something else after so
    many tokens of a row, and counts those of other documents: the scale of its queries, and its chunks if the mask was
    made of whole rows (`of_row`).
    """
    if position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} adds a position bias to its scores, which attention document by document does "
            "not support. Train the model without packing and padding_free."
        )
    rotates = getattr(module, "use_rope", False)
    scales = getattr(module, "attn_temperature_tuning", False) and not rotates
    chunk = (
        getattr(getattr(module, "config", None), "attention_chunk_size", None) if rotates and of_row else None
    )
    most = module.floor_scale if scales else chunk
    if most is not None and tokens >= most:
        what = (
            "scales queries" if scales else "begins a new chunk (which it does not without an attention_mask)"
        )
        raise ModelError(
            f"{type(module).__name__} {what} after {most} tokens of a row, and counts those of other documents. Pack "
            "shorter rows, or train without packing and padding_free."
        )


def _of_documents(
    mask: Tensor | None, borders: Tensor | None, positions: Tensor | None, query: Tensor
) -> DocumentMask | Tensor | None:
    """The documents of rows, for masks that were made without them, as some models make them, and transformers does if
    there is an attention mask too: by the borders that came with the batch, or by positions that start again.
    """
    rows, length = query.shape[0], query.shape[2]
    if borders is None or len(borders) <= 2 or rows != 1:
        is_other = mask is not None and mask.dtype is not torch.bool
        if positions is None or positions.shape != (rows, length) or is_other:
            return mask
        starts = document_starts(positions)
        # One document in each row: the mask is right as it is, with the padding that it knows.
        if len(starts) == rows:
            return mask
        borders = with_end(starts, rows * length)
    lengths = borders.diff().tolist()
    places = [divmod(start, length) for start in borders[:-1].tolist()]
    masks = [_part(mask, row, at, size) for (row, at), size in zip(places, lengths, strict=True)]
    return DocumentMask(lengths, masks, borders=borders.to(query.device, torch.int32))


def _part(mask: Tensor | None, row: int, start: int, size: int) -> Tensor | None:
    """The mask of one document. Padding, which nothing sees, sees itself: a softmax over nothing is not a number."""
    if mask is None:
        return None
    part = (mask[row] if mask.dim() == 4 and len(mask) > 1 else mask)[
        ..., start : start + size, start : start + size
    ]
    return part | torch.eye(size, dtype=torch.bool, device=mask.device) if mask.dtype is torch.bool else part


def _split(states: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """(rows, heads, tokens, size) as (1, tokens, heads, size) of each document: the layout in which they are joined."""
    return torch.split_with_sizes(states.transpose(1, 2).flatten(0, 1)[None], lengths, dim=1)


class _Attend(NamedTuple):
    """Attention of one kind of layer; see `document_attention`."""

    dropout: float
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of scaled products alone."""
        return not self.dropout and self.softcap is None and self.sinks is None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """(rows, heads, tokens, size) to (rows, tokens, heads, size)."""
        if self.softcap is None and self.sinks is None:
            attended = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.dropout,
                scale=self.scaling,
                is_causal=causal,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            attended = self._by_scores(query, key, value, mask, causal)
        return attended.transpose(1, 2)

    def _by_scores(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = (
            query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        )
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            # Not minus infinity: a softmax of nothing else is not a number.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        precise = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
        weights = nn.functional.dropout(weights, self.dropout)
        # The share of the sink belongs to no value.
        return weights[..., : value.shape[2]] @ value


def _logits(model: nn.Module, ids: Tensor, lengths: list[int]) -> Tensor:
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])[None]
    borders = torch.tensor([0, *lengths], dtype=torch.int32, device=ids.device).cumsum(0, dtype=torch.int32)
    try:
        outputs = model(
            input_ids=ids,
            position_ids=positions,
            cu_seq_lens_q=borders,
            cu_seq_lens_k=borders,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
            use_cache=False,
        )
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot run a packed row: {type(error).__name__}: {error} Train it without packing "
            "and padding_free."
        ) from error
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return logits
