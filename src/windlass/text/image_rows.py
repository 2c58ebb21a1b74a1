"""Prepared rows with their images, which are opened when a batch is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from windlass.core.types import IGNORED
from windlass.data.collate_pad import Batch, Features
from windlass.text.image_processing import ImageProcessing
from windlass.text.token_rows import PLACES, TokenRows


class ImageRows(Sequence[Any]):
    """A map-style dataset of rows `{"input_ids", "labels", "images"}`, packed ones with "seq_lengths".

    Images are as the dataset holds them: paths, bytes, or images of Pillow. They are not opened.

    Args:
        rows: tokens and labels, with the places of their images.
        encoder: finds the images of a row of `source`.
        source: the rows that were prepared.
    """

    def __init__(self, rows: TokenRows, encoder: Any, source: Any) -> None:
        self.rows, self._encoder, self._source = rows, encoder, source

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return ["images" if name == PLACES else name for name in self.rows.column_names]

    @property
    def lengths(self) -> Any:
        """Tokens of each row: int64 [rows]."""
        return self.rows.lengths

    def shuffle(self, seed: int) -> ImageRows:
        """Return the rows in another order, which `seed` decides."""
        return ImageRows(self.rows.shuffle(seed), self._encoder, self._source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice | str) -> Any:
        if not isinstance(index, (slice, str)):
            return self._row(index)
        columns = [index] if isinstance(index, str) else self.column_names
        numbers = range(len(self)) if isinstance(index, str) else range(*index.indices(len(self)))
        rows = [self._row(number) for number in numbers]
        found = {name: [row[name] for row in rows] for name in columns}
        return found[index] if isinstance(index, str) else found

    def _row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[index]
        places = row.pop(PLACES)
        images: list[Any] = []
        for number, count in zip(places[::2], places[1::2], strict=True):
            if count:
                images += self._encoder.images(self._source[number], number)[:count]
        return {**row, "images": images}

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))


class ImageCollator:
    """Collate rows with images: their texts as `text` does, and what the model is given of their images.

    A batch without any image gets a grey one, which no token sees: in its padding, or as a document of a row without
    padding. So the model takes the same path for every batch: sharded ranks that differ would wait for each other, and
    the weights for images have a gradient, 0.

    Args:
        text: list of samples with input_ids and labels -> batch of tensors, padded on the right or one row.
        images: what the processor makes of images.
        joins: batches of `text` are one row without padding.
    """

    def __init__(
        self, text: Callable[[Features], Batch], images: ImageProcessing, joins: bool = False
    ) -> None:
        self._text, self._images, self._joins = text, images, joins

    def __call__(self, samples: Features) -> Batch:
        opened = [[self._images.files.open(image) for image in sample["images"]] for sample in samples]
        batch = self._text(samples) if any(opened) else self._with_grey(samples, opened)
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        starts = batch["position_ids"].numpy() == 0 if self._joins else np.arange(ids.shape[1])[None] == 0
        kinds = self._images.kinds(ids, labels, starts)
        tensors = {name: batch["input_ids"].new_tensor(values) for name, values in kinds.items()}
        if self._joins:
            opened = [[image for row in opened for image in row]]
        return {**batch, **tensors, **self._images.inputs(opened)}

    def _with_grey(self, samples: Features, opened: list[list[Any]]) -> Batch:
        """The batch with a grey image, which is added to `opened`: as a document, or after the shortest row."""
        image, tokens = self._images.grey()
        targets = [IGNORED] * len(tokens)
        if self._joins:
            opened.append([image])
            return self._text([*samples, {"input_ids": tokens, "labels": targets}])
        # Mostly within the padding of the batch, which then is not longer.
        at = min(range(len(samples)), key=lambda row: len(samples[row]["input_ids"]))
        ids, labels = samples[at]["input_ids"], samples[at]["labels"]
        longer = {"input_ids": [*ids, *tokens], "labels": [*labels, *targets]}
        batch = self._text([*samples[:at], longer, *samples[at + 1 :]])
        # The collator took the grey image for a part of the row.
        batch["attention_mask"][at, len(ids) :] = 0
        opened[at].append(image)
        return batch
