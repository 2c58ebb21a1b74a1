"""Prepared rows with their images, which are opened when a batch is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from windlass.data.collate_default import Batch, Features
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

    Args:
        text: list of samples with input_ids and labels -> batch of tensors.
        images: what the processor makes of images.
    """

    def __init__(self, text: Callable[[Features], Batch], images: ImageProcessing) -> None:
        self._text, self._images = text, images

    def __call__(self, samples: Features) -> Batch:
        opened = [[self._images.files.open(image) for image in sample["images"]] for sample in samples]
        batch: Batch = self._text(samples)
        kinds = self._images.kinds(batch["input_ids"].numpy(), batch["labels"].numpy())
        return {**batch, **{name: batch["input_ids"].new_tensor(values) for name, values in kinds.items()},
                **self._images.inputs(opened)}  # fmt: skip
