"""The first rows of a run as its model gets them, for `samples.json`: read from its first batch, so no row is read
twice, and the order of none changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from windlass.core.output import shown
from windlass.core.types import IGNORED
from windlass.text.trained_pieces import Piece, decoded

_ROWS, _MOST_TOKENS = 3, 1024
_FEW = 2  # so many image tokens in a row are an image, and are not written out


def rows_of_batch(
    batch: Any, model: nn.Module, tokenizer: Any, *, pairs: bool = False
) -> list[dict[str, Any]]:
    """Return the first rows of a batch, as `samples.json` has them; none of a batch that is not text or images with
    labels.

    Args:
        batch: what the model is given.
        tokenizer: a tokenizer, or a processor with one; None if there is none.
        pairs: the second half of the rows are the rejected answers of the first half.
    """
    if not isinstance(batch, Mapping):
        return []
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return list(_images(batch, model))
    if not hasattr(tokenizer, "decode"):
        return []
    half = len(ids) // 2
    rows = [(place, f"row {place}") for place in range(min(len(ids), _ROWS))]
    if pairs and "groups" not in batch:
        rows = [
            (place + half * which, f"row {place}, {name}")
            for place in range(min(half, _ROWS))
            for which, name in enumerate(("chosen", "rejected"))
        ]
    reader = _Reader(batch, model, tokenizer)
    return [{"name": f"first batch, {name}", **reader.row(place)} for place, name in rows]


def sample_of(
    ids: Sequence[int],
    trained: Sequence[bool],
    tokenizer: Any,
    *,
    targets: Sequence[int] | None = None,
    label: str | None = None,
) -> dict[str, Any]:
    """Return a row of tokens as `samples.json` has it, without its name.

    Args:
        trained: whether each token is trained on.
        targets: what is predicted in place of each token, if that is not the token itself.
        label: of the whole row.
    """
    images = _image_tokens(tokenizer)
    numbers = range(min(len(ids), _MOST_TOKENS))
    pieces: list[Piece] = []
    for marked, places in groupby(numbers, key=lambda at: bool(trained[at])):
        some = list(places)
        text = _text([ids[at] for at in some], tokenizer, images)
        wanted = [] if targets is None or not marked else [targets[at] for at in some]
        is_other = any(token != ids[at] for token, at in zip(wanted, some, strict=False))
        pieces.append((f"{text} \u2192 {decoded(wanted, tokenizer)}" if is_other else text, marked))
    found = {"tokens": len(ids), "trained": sum(map(bool, trained)), "pieces": [list(one) for one in pieces]}
    return found if label is None else {**found, "label": label}


class _Reader:
    """Reads rows of a batch of tokens."""

    def __init__(self, batch: Mapping[str, Any], model: nn.Module, tokenizer: Any) -> None:
        self._batch, self._tokenizer = batch, tokenizer
        self._config = getattr(model, "config", None)
        # Labels of a model without a vocabulary at its end are classes of tokens.
        head = getattr(model, "get_output_embeddings", None)
        self._predicts_tokens = head is not None and head() is not None

    def row(self, place: int) -> dict[str, Any]:
        ids, kept = self._column("input_ids", place), self._column("attention_mask", place)
        labels, answers = self._column("labels", place), self._column("completion_mask", place)
        label = None
        for found in (self._batch.get("labels"), self._batch.get("label")):
            if isinstance(found, Tensor) and found.dim() == 1:
                label = label or _label(found[place], self._config)
        where = [at for at in range(len(ids)) if len(kept) != len(ids) or kept[at]]
        shown_ids = [ids[at] for at in where]
        if len(answers) == len(ids):
            trained = [bool(answers[at]) for at in where]
            return sample_of(shown_ids, trained, self._tokenizer, label=label)
        # The labels of an encoder-decoder are another text, which has the length of the input only by chance.
        if len(labels) == len(ids) and not getattr(self._config, "is_encoder_decoder", False):
            targets = [labels[at] for at in where]
            trained, wanted = [target != IGNORED for target in targets], self._predicts_tokens
            return sample_of(shown_ids, trained, self._tokenizer, targets=targets if wanted else None)
        read = sample_of(shown_ids, [False] * len(where), self._tokenizer, label=label)
        if not labels:
            return read
        written = [token for token in labels if token != IGNORED]
        answer = sample_of(written, [True] * len(written), self._tokenizer)
        return {
            "tokens": read["tokens"] + answer["tokens"],
            "trained": answer["trained"],
            "pieces": [*read["pieces"], *answer["pieces"]],
        }

    def _column(self, name: str, place: int) -> list[int]:
        """One row of a table of the batch; empty if there is no such table."""
        table = self._batch.get(name)
        return table[place].tolist() if isinstance(table, Tensor) and table.dim() == 2 else []


def _images(batch: Mapping[str, Any], model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield rows of images with one label each."""
    images, labels = batch.get("pixel_values"), batch.get("labels")
    if isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.dim() == 1:
        for place, label in enumerate(labels[:_ROWS]):
            pieces = [[f"[image {' x '.join(map(str, images.shape[1:]))}]", False]]
            found = {"name": f"first batch, row {place}", "tokens": 0, "trained": 0, "pieces": pieces}
            yield {**found, "label": _label(label, getattr(model, "config", None))}


def _label(value: Tensor, config: Any) -> str:
    """The name of a class; the number itself if it is not one of a class with a name."""
    number = value.item()
    names = getattr(config, "id2label", None) or {}
    return shown(names.get(number, number)) if isinstance(number, int) else f"{number:g}"


def _image_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens in whose places a model has images."""
    ids = (getattr(tokenizer, "image_token_id", None), *(getattr(tokenizer, "image_token_ids", None) or ()))
    return frozenset(one for one in ids if isinstance(one, int))


def _text(ids: Sequence[int], tokenizer: Any, images: frozenset[int]) -> str:
    """Tokens as text; a run of image tokens as the place of an image."""
    parts = []
    for is_image, group in groupby(ids, key=lambda token: token in images):
        some = list(group)
        parts.append(
            f"[image: {len(some):,} tokens]" if is_image and len(some) >= _FEW else decoded(some, tokenizer)
        )
    return "".join(parts)
