"""Images of rows, opened when they are used: files, bytes, images of Pillow, arrays, and addresses if allowed."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.core.errors import DataError
from windlass.core.optional import require

# Where a part of a message, or the record that a table has for an image, holds the image itself.
CONTENTS = ("image", "bytes", "path", "url", "base64")
_WEB = ("http://", "https://")
_ORIENTATION = 0x0112  # EXIF: how a camera was held; from 5 on, width and height are exchanged
_SIDEWAYS = frozenset(range(5, 9))
_SECONDS = 30
# How files end; little may follow.
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
_TAIL = 64
_PURPOSE = "read images"
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Opens images."""

    folder: str = ""  # relative paths begin here; "" is the current folder
    allow_urls: bool = False  # read http and https addresses, each time an image is used

    def size(self, source: Any) -> Size:
        """Return (width, height) as `open` gives them. The image is decoded only if its file does not end as it should.
        Raises DataError if it is not an image, or cannot be read.
        """
        pillow = _pillow()
        with _reported(source):
            image = self._opened(source)
            if not _is_whole(image):
                image.load()
            # Not that of its class: of a PNG without such data, it decodes the image.
            orientation = pillow.Image.getexif(image).get(_ORIENTATION, 1)
            width, height = image.size
            return (height, width) if orientation in _SIDEWAYS else (width, height)

    def open(self, source: Any) -> Any:
        """Return an image of Pillow in RGB, turned as its EXIF data asks for. Raises DataError as `size`."""
        operations = require("PIL.ImageOps", _PURPOSE)
        with _reported(source):
            return operations.exif_transpose(self._opened(source)).convert("RGB")

    def _opened(self, source: Any) -> Any:
        pillow = _pillow()
        if isinstance(source, pillow.Image):
            image = source
        elif isinstance(source, np.ndarray):
            image = pillow.fromarray(source)
        else:
            content = self._content(source)
            image = pillow.open(io.BytesIO(content) if isinstance(content, bytes) else content)
        if image.mode.startswith(("I", "F")):
            # Pillow would set all that is above 255 to 255, so a scan of 16 bits would be white.
            raise ValueError(f"it has more than 8 bits (mode {image.mode!r}): scale its values to 0 to 255")
        return image

    def _content(self, source: Any) -> bytes | Path:
        if isinstance(source, (bytes, bytearray)):
            return bytes(source)
        if isinstance(source, Path):
            return Path(self.folder) / source
        if not isinstance(source, str):
            raise TypeError(
                f"a {type(source).__name__} is not an image: give a path, bytes, or an image of Pillow"
            )
        if source.startswith(_WEB):
            return self._fetched(source)
        if source.startswith("data:image/"):
            return base64.b64decode(source.partition(",")[2], validate=True)
        if source.startswith("file://"):
            return Path(urllib.request.url2pathname(source.removeprefix("file://")))
        return Path(self.folder) / source

    def _fetched(self, address: str) -> bytes:
        if not self.allow_urls:
            raise ValueError(
                "addresses are not read: download the image, or set dataset_kwargs={'allow_image_urls': True}"
            )
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            content: bytes = answer.read()
            return content


def source_of(value: Any) -> Any:
    """Return the image of a part of a message or of a record of a table; any other value as it is.

    A record has bytes, or a path if it has none. Raises DataError if it has no image.
    """
    if not isinstance(value, Mapping):
        return value
    if value.get("bytes") is not None:
        return value["bytes"]
    if value.get("base64") is not None:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise DataError(f"an image in base64 cannot be decoded: {error}") from None
    for name in ("image", "path", "url"):
        if value.get(name) is not None:
            return source_of(value[name])
    raise DataError(f"an image with the keys {sorted(map(str, value))} has no content: {', '.join(CONTENTS)}")


def _pillow() -> Any:
    return require("PIL.Image", _PURPOSE)


def grey_image(size: Size) -> Any:
    return _pillow().new("RGB", size, (128, 128, 128))


def name_of_image(source: Any) -> str:
    """How a message names an image: by its file or address, else by what holds it."""
    if isinstance(source, (str, Path)):
        text = str(source)
        return repr(text if len(text) <= 200 else f"{text[:60]}...")
    if isinstance(source, (bytes, bytearray)):
        return f"{len(source)} bytes"
    return f"the {type(source).__name__}" + (
        f" {source.filename!r}" if getattr(source, "filename", "") else ""
    )


def _is_whole(image: Any) -> bool:
    """Return True for an image in memory, and for one whose file has the last bytes of its format."""
    file, end = getattr(image, "fp", None), _ENDS.get(image.format or "")
    if file is None:
        return True
    if end is None:
        return False
    at = file.tell()
    file.seek(max(file.seek(0, io.SEEK_END) - _TAIL, 0))
    found = end in file.read()
    file.seek(at)
    return found


@contextlib.contextmanager
def _reported(source: Any) -> Iterator[None]:
    """Context that names an image in what goes wrong with it: Pillow raises several types, and SyntaxError of them."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"the image {name_of_image(source)} does not open: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
