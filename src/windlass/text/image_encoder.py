"""Turn rows with images into token ids and labels: those of their text, with each image as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.core.errors import DataError
from windlass.core.types import IGNORED
from windlass.text.encoder import EncodedRows, RowEncoder, token_ranges
from windlass.text.forms import Form, Row, RowError, standardised
from windlass.text.image_messages import images_of, take_images
from windlass.text.image_processing import Expanded, ImageProcessing

_IMAGES = "images"
_PLACE = "<image>"  # of conversations in LLaVA's form


class ImageRowEncoder(RowEncoder):
    """As `RowEncoder`, for rows with images: their sizes are read, and they are not decoded.

    No token of an image has a label. A row that is too long is cut before the first image that does not fit whole; that
    image and the later ones are left out of the row.

    Args:
        images: what the processor makes of images.
    """

    made = (*RowEncoder.made, _IMAGES)

    def __init__(self, images: ImageProcessing, options: Any, form: Form, example: Row) -> None:
        self._images = images
        processor = images.processor
        template = options.chat_template or processor.chat_template or processor.tokenizer.chat_template
        self._has_template = bool(template)
        super().__init__(
            processor.tokenizer, replace(options, chat_template=default_template(template)), form, example
        )

    def __call__(self, rows: Sequence[Row], first: int) -> EncodedRows:
        standard = [self._standard(row, first + at) for at, row in enumerate(rows)]
        texts, prompts, spans = self._rendered(standard, first)
        whole, before = [], []
        for at, row in enumerate(standard):
            try:
                sizes = [self._images.files.size(image) for image in row[_IMAGES]]
                ends = len(prompts[at]) if self._kind == "pair" else None
                whole.append(self._images.expanded(texts[at], sizes, ends_prompt=ends))
                if prompts[at]:
                    # The images of the prompt come first: it is the beginning of the whole text.
                    sizes = sizes[: prompts[at].count(self._images.token)]
                    before.append(self._images.expanded(prompts[at], sizes, ends_prompt=ends).text)
                else:
                    before.append("")
            except DataError as error:
                raise RowError(first + at, str(error)) from None
        if spans is not None:
            spans = [_moved(row, text) for row, text in zip(spans, whole, strict=True)]
        texts = [text.text for text in whole]
        pairs = self._labelled(texts, before, spans, first)
        return self._without_parts(pairs, self._places(whole), first)

    def images(self, row: Row, number: int) -> list[Any]:
        """The images of a row, in the order of its text."""
        found: list[Any] = self._standard(row, number)[_IMAGES]
        return found

    def columns(self, found: EncodedRows, rows: Sequence[Row], first: int) -> dict[str, Any]:
        """As of a text, and the images of each row that is kept."""
        places = zip(found.places[::2], found.places[1::2], strict=True)
        images = [self.images(rows[number - first], number)[:count] for number, count in places]
        return {**super().columns(found, rows, first), _IMAGES: images}

    def _standard(self, row: Row, number: int) -> dict[str, Any]:
        options = self._options
        try:
            found = standardised(
                row, self._form, options.dataset_text_field, self._has_template, ("text", "image")
            )
            if self._form is Form.TOKENIZED:
                raise DataError("has tokens and images; give the text, and the tokens are made of both")
            if self._form is Form.SHAREGPT:
                found["messages"] = [_with_parts(message) for message in found["messages"]]
            found, images = take_images(found, images_of(row))
        except DataError as error:
            raise RowError(number, str(error)) from None
        return {**found, _IMAGES: images}

    def _places(self, texts: Sequence[Expanded]) -> list[list[tuple[int, int]]]:
        """The (first, last + 1) tokens of each image of each text."""
        encoded = self._tokenizer(
            [text.text for text in texts],
            add_special_tokens=not self._chats,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            token_ranges(offsets, text.images)
            for offsets, text in zip(encoded["offset_mapping"], texts, strict=True)
        ]

    def _without_parts(
        self,
        pairs: Sequence[tuple[list[int], list[int]]],
        places: Sequence[list[tuple[int, int]]],
        first: int,
    ) -> EncodedRows:
        """Take the labels from images, and truncate so that none is cut."""
        found = EncodedRows()
        for number, ((ids, labels), images) in enumerate(zip(pairs, places, strict=True), first):
            # The model is given the image in the place of these tokens, and is not to predict them.
            for start, end in images:
                labels[start:end] = [IGNORED] * (end - start)
            kept = len(images)
            if self._is_too_long(len(ids), number):
                cut = self._options.max_length
                # A part of an image has fewer tokens than the model makes of the image, and its forward refuses that.
                kept = sum(end <= cut for _, end in images)
                cut = min(cut, images[kept][0]) if kept < len(images) else cut
                ids, labels = ids[:cut], labels[:cut]
                found.truncated += 1
            self._add(found, number, ids, labels, number, kept)
        return found


def default_template(template: Any) -> str | None:
    """The one of several named templates that is used if none is asked for."""
    return template.get("default") if isinstance(template, dict) else template


def _moved(spans: list[tuple[int, int]], text: Expanded) -> list[tuple[int, int]]:
    return [(text.shifted(start), text.shifted(end)) for start, end in spans]


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message in LLaVA's form, whose text has `<image>` in the places of images, as parts."""
    content = message.get("content")
    if not isinstance(content, str) or _PLACE not in content:
        return message
    first, *others = content.split(_PLACE)
    parts = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}
