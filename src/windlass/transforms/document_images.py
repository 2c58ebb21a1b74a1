"""Packed rows of models whose positions or masks depend on images: they are computed for each document alone.

Qwen-VL counts positions in three dimensions, from the images before a token; in Gemma 3 the tokens of an image see
each other, in PaliGemma those of a prompt. These models compute that for a row as if it were one text. Within
`images_apart` they are given what they compute of the documents as rows of their own: `get_rope_index` and
`create_masks_for_generate` are the models' own functions, and know of no packing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from windlass.transforms.document_mask import BORDERS, DocumentMask, document_starts

Hooked = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def images_apart(model: nn.Module) -> Iterator[None]:
    """Within the context positions and masks that depend on images are those of each document alone.

    Args:
        model: a model of transformers, in which attention is document by document.
    """
    with contextlib.ExitStack() as stack:
        for module, hook in _dependent_on_images(model):
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _dependent_on_images(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        if hasattr(module, "get_rope_index"):
            yield module, _with_positions
    tower = _tower(model)
    if tower is not None:
        yield tower, _without_borders
    sees_images = "image" in (getattr(model, "input_modalities", None) or ())
    if sees_images and "create_masks_for_generate" in vars(type(model)):  # its masks depend on images
        # Not the outer model, whose hooks adapters leave out.
        inner: Any = model.base_model
        yield inner, partial(_with_masks, model)


def _tower(model: Any) -> nn.Module | None:
    """The part of the model that sees the images."""
    config = getattr(model.config, "vision_config", None)
    parts = model.modules() if config is not None else ()
    return next((part for part in parts if getattr(part, "config", None) is config), None)


def _without_borders(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Hooked:
    """The documents' borders are in tokens, and no part of an image; transformers before 5.18 hands them on to it."""
    return args, {name: value for name, value in given.items() if name not in BORDERS}


def _with_positions(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Hooked:
    """Positions (4, rows, tokens): those of a text, then three dimensions as the model counts them in each document."""
    positions, kinds = given.get("position_ids"), given.get("mm_token_type_ids")
    grids = given.get("image_grid_thw")
    if not _is_a_row(positions) or kinds is None or grids is None:
        return args, given
    documents = _Documents(positions)
    counted, _ = module.get_rope_index(
        input_ids=documents.rows_of(given["input_ids"]),
        mm_token_type_ids=documents.rows_of(kinds),
        image_grid_thw=grids,
        attention_mask=documents.there.long(),
    )
    of_images = counted[:, documents.there].view(3, *positions.shape)
    return args, {**given, "position_ids": torch.cat([positions[None], of_images])}


def _is_a_row(positions: Any) -> TypeGuard[Tensor]:
    """Whether there are positions of one row, as packed rows have."""
    return positions is not None and positions.ndim == 2 and len(positions) == 1


def _with_masks(model: Any, module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Hooked:
    """Masks as the model makes them of each document."""
    positions, kinds = given.get("position_ids"), given.get("token_type_ids")
    if not _is_a_row(positions) or given.get("attention_mask") is not None:
        return args, given
    if kinds is None and len(set(getattr(model.config.get_text_config(), "layer_types", None) or ())) > 1:
        return args, given  # a text, which layers of several kinds keep apart by its positions
    documents = _Documents(positions)
    masks = model.create_masks_for_generate(
        model.config,
        torch.empty(*documents.there.shape, 1, dtype=module.dtype, device=positions.device),
        documents.there,
        # The cache, whose name depends on the version, and positions.
        None,
        None,
        token_type_ids=None if kinds is None else documents.rows_of(kinds),
    )
    if isinstance(masks, dict) and len(masks) > 1:
        return args, {**given, "attention_mask": documents.by_kind(masks)}
    # A model with one kind of layers takes a mask of the row alone, which its attention splits by documents.
    mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
    of_row: Tensor = torch.block_diag(*documents.masks(mask))  # type: ignore[no-untyped-call]
    return args, {**given, "attention_mask": of_row[None, None].bool()}


class _Documents:
    """The documents of a packed row, as rows of their own.

    Args:
        positions: positions that start again at each document: shape (1, tokens).

    Attributes:
        there: which tokens the documents have: bool, shape (documents, longest).
    """

    def __init__(self, positions: Tensor) -> None:
        starts = document_starts(positions)
        sizes = torch.diff(starts, append=starts.new_tensor([positions.numel()]))
        self._lengths = sizes.tolist()
        self.there = torch.arange(max(self._lengths), device=positions.device) < sizes[:, None]

    def rows_of(self, values: Tensor) -> Tensor:
        """(1, tokens) as (documents, longest), padded with 0."""
        return pad_sequence(list(torch.split(values[0], self._lengths)), batch_first=True)

    def masks(self, mask: Tensor | None) -> list[Tensor]:
        """(documents, 1, longest, longest) as a mask (queries, keys) of each document; None: causal."""
        if mask is None:
            mask = self.there.new_ones(*self.there.shape, self.there.shape[1]).tril()[:, None]
        return [document[0, :size, :size] for document, size in zip(mask, self._lengths, strict=True)]

    def by_kind(self, masks: dict[str, Tensor | None]) -> dict[str, DocumentMask]:
        """The masks of each kind of layer, as layers get them."""
        return {kind: DocumentMask(self._lengths, [*self.masks(mask)]) for kind, mask in masks.items()}
