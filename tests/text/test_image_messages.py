from __future__ import annotations

import copy
from typing import Any

import pytest

from windlass import prepare_multimodal_messages
from windlass.core.errors import DataError
from windlass.text.image_messages import images_of

USER, REPLY = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Is"}, {"type": "image"}, {"type": "image"}]}
CASES: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([USER, REPLY], ["a"]),
    ([USER, REPLY, USER], ["a", "b"]),
    ([{"role": "system", "content": "Look."}, USER, REPLY], []),
    ([PARTS, REPLY], ["a", "b"]),
    ([{"role": "user", "content": [{"type": "image", "image": "c"}]}, REPLY], []),
]


@pytest.mark.parametrize(("messages", "images"), CASES)
def test_messages_are_those_of_trl(messages: list[dict[str, Any]], images: list[str]) -> None:
    pytest.importorskip("trl")
    from trl.data_utils import prepare_multimodal_messages as theirs

    before = copy.deepcopy(messages)
    assert prepare_multimodal_messages(messages, images) == theirs(copy.deepcopy(messages), images)
    assert messages == before


def test_wrong_numbers_and_roles() -> None:
    with pytest.raises(ValueError, match=r"Number of images provided \(1\) does not match .* \(2\)"):
        prepare_multimodal_messages([PARTS], ["a"])
    with pytest.raises(ValueError, match="Invalid role in message: bot"):
        prepare_multimodal_messages([{"role": "bot", "content": "x"}])


def test_images_of_columns() -> None:
    assert images_of({"image": "a"}) == images_of({"images": ["a"], "image": None}) == ["a"]
    assert images_of({"images": None}) == images_of({"text": "x"}) == []
    with pytest.raises(DataError, match="the columns 'image' and 'images'"):
        images_of({"image": "a", "images": ["b"]})
    with pytest.raises(DataError, match="column 'images' must hold a list of images, not str"):
        images_of({"images": "a"})
