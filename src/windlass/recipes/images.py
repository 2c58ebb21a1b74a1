"""Images with a class: those of a folder, or the digits of scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.core.errors import DataError
from windlass.recipes.digits import WHITE, load_digits
from windlass.recipes.readers import first_of_folders
from windlass.recipes.schema import DataSpec
from windlass.recipes.splits import hold_out
from windlass.text.image_files import ImageFiles

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


class Images:
    """Items `{"pixel_values": float32 [channels, height, width] from -1 to 1, "labels": int}`.

    Args:
        sources: arrays [channels, height, width] of whole numbers up to `white`, or paths.
        size: width and height that files are scaled to; None: as they are.
    """

    def __init__(self, sources: list[Any], labels: list[int], white: float, size: int | None) -> None:
        self._sources, self._labels, self._white, self._size = sources, labels, white, size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = self._sources[index]
        pixels = _read(source, self._size) if isinstance(source, Path) else source
        values = torch.from_numpy(np.asarray(pixels, dtype=np.float32)) * (2 / self._white) - 1
        return {"pixel_values": values, "labels": self._labels[index]}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the first image."""
        channels, height, width = self[0]["pixel_values"].shape
        return channels, height, width


def _read(path: Path, size: int | None) -> np.ndarray[Any, Any]:
    """The image as RGB, of shape [3, height, width]. Raises DataError if it cannot be read."""
    colours = ImageFiles().open(path)
    return np.asarray(colours if size is None else colours.resize((size, size))).transpose(2, 0, 1)


def load_images(data: DataSpec, seed: int) -> tuple[Images, Images | None, list[str]]:
    """Return the training images, those of the evaluation (None without any), and the names of the classes. Raises
    DataError if a folder has no images or only one class, or the evaluation has another class.
    """
    if data.format == "digits":
        images, digits = (values[: data.max_samples] for values in load_digits())
        train: list[tuple[Any, str]] = [
            (image[None], str(digit)) for image, digit in zip(images, digits, strict=True)
        ]
        white = WHITE
    else:
        train, white = _files(Path(data.train), data.max_samples), 255.0
    held = _files(Path(data.eval), data.max_samples) if data.eval else []
    if data.eval is None and data.eval_fraction:
        train, held = hold_out(train, f"{len(train)} images", data.eval_fraction, seed)
    if data.image_size is None:
        _refuse_unequal([source for source, _ in (*train, *held) if isinstance(source, Path)])
    names = sorted({label for _, label in train})
    if len(names) < 2:
        raise DataError(f"{data.train}: has images of one class only ({names[0]}); two are needed")
    # Numbered by the training data alone: a class of the evaluation that it lacks would never be predicted.
    sets = [_images(part, names, white, data.image_size) if part else None for part in (train, held)]
    assert sets[0] is not None
    return sets[0], sets[1], names


def _refuse_unequal(files: list[Path]) -> None:
    """Refuse images that are not of one size, of which no batch can be made."""
    images, first = ImageFiles(), None
    for file in files:
        size = images.size(file)
        first = first or size
        if size != first:
            one, other = (f"{width} x {height}" for width, height in (size, first))
            raise DataError(
                f"{file} is {one} pixels, and {files[0]} {other}: set the size that all are scaled to, data.image_size"
            )


def _images(rows: list[tuple[Any, str]], names: list[str], white: float, size: int | None) -> Images:
    for source, label in rows:
        if label not in names:
            raise DataError(f"{source}: class {label!r} never occurs in the training data")
    return Images([source for source, _ in rows], [names.index(label) for _, label in rows], white, size)


def _files(folder: Path, most: int | None) -> list[tuple[Any, str]]:
    # Hidden ones are of other programs: `.ipynb_checkpoints` is not a class.
    seen = sorted(folder.glob("[!.]*/[!.]*"))
    files = first_of_folders([file for file in seen if file.suffix.lower() in ENDINGS], most)
    if not files:
        raise DataError(f"{folder}: has no images ({', '.join(ENDINGS)}) in folders of their classes")
    return [(file, file.parent.name) for file in files]
