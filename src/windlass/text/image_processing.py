"""What a processor makes of images: the text that represents each, and the tensors that the model is given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.optional import require
from windlass.core.types import IGNORED
from windlass.text.image_files import ImageFiles, Size, grey_image

_OF_TEXT = frozenset({"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"})
_TYPES = ("token_type_ids", "mm_token_type_ids")
_PROBE = (32, 32)


class Expanded(NamedTuple):
    """A text in which each place of an image is as long as the image."""

    text: str
    images: list[tuple[int, int]]  # the characters (start, end) that represent each image
    # For each image, the end of its place in the text before, and the characters gained up to there
    moved: list[tuple[int, int]]

    def shifted(self, character: int) -> int:
        """Where a character of the text before is now."""
        gained = 0
        for end, characters in self.moved:
            if character < end:
                break
            gained = characters
        return character + gained


class ImageProcessing:
    """What one processor makes of images. Pure, and known to other processes.

    The text that represents an image depends on its size alone: it is read once for each size from what the processor
    makes of a grey image, before any image is decoded. `inputs` compares it with the real ones.

    Args:
        processor: a `ProcessorMixin` of transformers with an image processor, a tokenizer and an `image_token`.
        files: opens images.
        takes: what the model's forward takes; None: all that the processor makes.

    Raises:
        ConfigError: the processor does not have what is needed.
    """

    def __init__(
        self, processor: Any, files: ImageFiles | None = None, takes: Collection[str] | None = None
    ) -> None:
        self.processor, self.files = processor, files or ImageFiles()
        kind = type(processor).__name__
        if getattr(processor, "image_token", None) is None:
            fix = f"{kind} has no image_token, which marks the places of images in a text"
            raise ConfigError(Problem("processing_class", kind, fix))
        self.token: str = processor.image_token
        self._ids = np.array([i for i in processor.image_token_ids if i is not None])
        self._expansion = lru_cache(maxsize=1 << 16)(self._measured)
        self._count = lru_cache(maxsize=1 << 16)(self._counted)
        # PaliGemma's tokens see each other up to the answer, and its texts get a beginning and a line break.
        self.has_prefix = hasattr(require("transformers", "train on images"), "PaliGemmaProcessor") and any(
            base.__name__ == "PaliGemmaProcessor" for base in type(processor).__mro__
        )
        self._types = self._kinds_of_tokens(takes)

    def __reduce__(self) -> Any:
        return ImageProcessing, (self.processor, self.files, self._types)

    @property
    def model_inputs(self) -> list[str]:
        """Names of what the model is given of images and kinds of tokens."""
        return [*self._types, *(name for name in self._probe() if name not in _OF_TEXT)]

    def _probe(self) -> Any:
        try:
            return self.processor(
                text=[self.token],
                images=[[grey_image(_PROBE)]],
                return_tensors="np",
                add_special_tokens=False,
            )
        except Exception as error:  # of another library, on its own input
            fix = (
                f"cannot process a grey image of {_PROBE[0]} x {_PROBE[1]} ({type(error).__name__}: {error})"
            )
            raise ConfigError(Problem("processing_class", type(self.processor).__name__, fix)) from error

    def _kinds_of_tokens(self, takes: Collection[str] | None) -> tuple[str, ...]:
        """The names under which the processor returns the kind of each token, if the model takes them."""
        made = self._probe()
        names = tuple(name for name in _TYPES if name in made and (takes is None or name in takes))
        own = np.isin(made["input_ids"], self._ids).astype(np.int64)
        for name in names:
            if not self.has_prefix and not np.array_equal(made[name], own):
                fix = f"gives {name} that are not 1 for the tokens of images and 0 for all others"
                raise ConfigError(Problem("processing_class", type(self.processor).__name__, fix))
        return names

    def expanded(self, text: str, sizes: Sequence[Size], *, ends_prompt: int | None = None) -> Expanded:
        """Return a text whose places of images are as long as images of these sizes. Raises DataError if there are
        more or fewer places.

        Args:
            ends_prompt: where the prompt in the text ends, for processors that end prompts in their own way.
        """
        found = text.count(self.token)
        if found != len(sizes):
            raise DataError(
                f"has {len(sizes)} images, and {found} places for images ({self.token!r}) in its text; they must be as "
                "many"
            )
        pieces = text.split(self.token)
        joined, images, moved, before = pieces[0], [], [], len(pieces[0])
        for piece, size in zip(pieces[1:], sizes, strict=True):
            start = len(joined)
            joined += self._expansion(size)
            images.append((start, len(joined)))
            before += len(self.token)
            moved.append((before, len(joined) - before))
            joined += piece
            before += len(piece)
        expanded = Expanded(joined, images, moved)
        return self._with_prefix(expanded, len(text), ends_prompt) if self.has_prefix else expanded

    def _with_prefix(self, found: Expanded, length: int, ends_prompt: int | None) -> Expanded:
        """PaliGemma: a beginning after the last image, and a line break after the prompt."""
        begin = self.processor.tokenizer.bos_token
        at = found.images[-1][1] if found.images else 0
        text = found.text[:at] + begin + found.text[at:]
        start = found.moved[-1] if found.moved else (0, 0)
        moved = [*found.moved[:-1], (start[0], start[1] + len(begin))]
        if ends_prompt is not None:
            place = Expanded(text, found.images, moved).shifted(ends_prompt)
            text = text[:place] + "\n" + text[place:]
            moved.append((ends_prompt, moved[-1][1] + 1))
        return Expanded(text, found.images, moved)

    def _measured(self, size: Size) -> str:
        """The text that represents an image of this size."""
        made = self.processor(
            text=[self.token],
            images=[[grey_image(size)]],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
        )
        offsets = made.get("text_replacement_offsets")
        if not offsets:
            fix = "does not return the text that represents an image (return_text_replacement_offsets)"
            raise ConfigError(Problem("processing_class", type(self.processor).__name__, fix))
        text: str = offsets[0][0]["replacement"]
        return text

    def _counted(self, size: Size) -> int:
        """The tokens of an image of this size, without those around it."""
        ids = self.processor.tokenizer(self._expansion(size), add_special_tokens=False)["input_ids"]
        return int(np.isin(ids, self._ids).sum())

    def grey(self) -> tuple[Any, list[int]]:
        """Return a small grey image, and the tokens that represent it."""
        text = self._expansion(_PROBE)
        tokens: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return grey_image(_PROBE), tokens

    def inputs(self, images: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return the tensors of a batch's images; none if it has no images.

        Args:
            images: of each row of the batch, opened.

        Raises:
            DataError: an image has more or fewer tokens than a grey one of its size.
        """
        rows = [list(row) for row in images]
        if not any(rows):
            return {}
        made = self.processor(
            text=[self.token * len(row) for row in rows],
            images=rows,
            padding=True,
            return_tensors="pt",
            add_special_tokens=False,
        )
        found = np.isin(made["input_ids"].numpy(), self._ids).sum(axis=1).tolist()
        expected = [sum(self._count(image.size) for image in row) for row in rows]
        if found != expected:
            raise DataError(
                f"images of {[[image.size for image in row] for row in rows]} have {found} tokens, and grey ones of "
                f"these sizes have {expected}, so {type(self.processor).__name__} cannot be used"
            )
        return {name: value for name, value in made.items() if name not in _OF_TEXT}

    def kinds(self, ids: Any, labels: Any, starts: Any) -> dict[str, Any]:
        """Return the kinds of tokens that the model takes: int64 arrays of the shape of `ids`.

        PaliGemma: 0 up to the first target of a text, which see each other; 1 after it. Others: 1 for tokens of images.

        Args:
            starts: which tokens begin a text: bool, of the same shape; the first of each row does.
        """
        if self.has_prefix:
            targets = (labels != IGNORED).cumsum(axis=-1)
            before = np.maximum.accumulate(np.where(starts, targets - (labels != IGNORED), 0), axis=-1)
            kinds = (targets > before).astype(np.int64)
        else:
            kinds = np.isin(ids, self._ids).astype(np.int64)
        return dict.fromkeys(self._types, kinds)
