"""The images of a row, and their places in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.core.errors import DataError
from windlass.text.image_files import CONTENTS, source_of

Message = dict[str, Any]
COLUMNS = ("image", "images")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None
) -> list[Message]:
    """Return messages whose contents are lists of parts, with the images in theirs.

    A content that is a text becomes a part. If the first message of the user is a text, the images go before it;
    otherwise they go, in order, to the parts `{"type": "image"}` that have none.

    Args:
        messages: each with a role, and a content that is a text or a list of parts; they are not changed.
        images: whatever images are to be; not opened.

    Raises:
        ValueError: an unknown role, or another number of images than of places for them.
    """
    given = list(images or [])
    placed = place_images(messages, len(given))
    for message in placed:
        if message["role"] not in _ROLES:
            raise ValueError(f"Invalid role in message: {message['role']}. Expected one of {sorted(_ROLES)}.")
    free = [part for part in _image_parts(placed) if not _has_content(part)]
    if len(free) != len(given):
        raise ValueError(
            f"Number of images provided ({len(given)}) does not match number of image placeholders ({len(free)})."
        )
    for part, image in zip(free, given, strict=True):
        part["image"] = image
    return placed


def place_images(messages: Sequence[Mapping[str, Any]], count: int) -> list[Message]:
    """Return copies of messages with contents of parts. Unless they have places for images already, `count` of them are
    made before the first content of the user that is a text.
    """
    placed: list[Message] = []
    copies = [_copied(message) for message in messages]
    # A part without content is a place that the row chose itself: no other places are made then.
    waiting = count if all(_has_content(part) for part in _image_parts(copies)) else 0
    for message in copies:
        content = message.get("content")
        if isinstance(content, str):
            parts: list[Any] = [{"type": "text", "text": content}]
            if message.get("role") == "user":
                parts, waiting = [*({"type": "image"} for _ in range(waiting)), *parts], 0
            message = {**message, "content": parts}
        placed.append(message)
    return placed


def take_images(row: Mapping[str, Any], given: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return a standardised row whose messages have empty parts for images, and its images in their order.

    Args:
        row: with "messages", "prompt" and "completion", or "text".
        given: those of its columns; a text row has them all.

    Raises:
        DataError: another number of images than of places for them.
    """
    names = [name for name in ("messages", "prompt", "completion") if isinstance(row.get(name), list)]
    if not names:
        return dict(row), list(given)
    changed, found, waiting = dict(row), [], list(given)
    # Images of a text go to the first message of the user, which is in the prompt if there is one.
    lengths = [len(row[name]) for name in names]
    placed = place_images([message for name in names for message in row[name]], len(given))
    places = 0
    for part in _image_parts(placed):
        if _has_content(part):
            found.append(source_of(part))
        else:
            places += 1
            found.append(waiting.pop(0) if waiting else None)
        # The text is rendered from empty parts: images are opened when a batch is made.
        for name in CONTENTS:
            part.pop(name, None)
    if places != len(given):
        raise DataError(
            f"has {len(given)} images in its columns, and {places} parts {{'type': 'image'}} without one in its "
            "messages; they must be as many"
        )
    for name, length in zip(names, lengths, strict=True):
        changed[name], placed = placed[:length], placed[length:]
    return changed, found


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in the columns "image" and "images" of a row; none if they are null. Raises DataError for both."""
    one, several = row.get("image"), row.get("images")
    if one is not None and several is not None:
        raise DataError("has the columns 'image' and 'images'; keep one of them")
    if several is None:
        several = [] if one is None else [one]
    if not isinstance(several, (list, tuple)):
        raise DataError(
            f"column 'images' must hold a list of images, not {type(several).__name__}; a single one is in 'image'"
        )
    return [source_of(image) for image in several]


def has_image_parts(row: Any) -> bool:
    if not isinstance(row, Mapping):
        return False
    values = (row.get(name) for name in ("messages", "prompt", "completion"))
    return any(
        isinstance(part, Mapping) and part.get("type") == "image"
        for messages in values
        if isinstance(messages, list)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What tools return is left as it is."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list) and message.get("role") != "tool"
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "image"
    ]


def _has_content(part: Mapping[str, Any]) -> bool:
    return any(part.get(name) is not None for name in CONTENTS)


def _copied(message: Mapping[str, Any]) -> Message:
    """A copy of a message and of its parts, without the nulls that tables put into them. What tools return is left."""
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == "tool":
        return dict(message)
    parts = [
        {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else part
        for part in content
    ]
    return {**message, "content": parts}
