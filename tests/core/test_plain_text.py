"""Text that anybody may have written: bounded, and wrong in one way only."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from windlass.core import whole_file
from windlass.core.whole_file import parse_json, read_text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 10_000, "digits"),
        (b"\xff{}", "UTF-8"),
        ("{", "Expecting"),
    ],
)
def test_whatever_is_wrong_with_json_is_one_error(text: str | bytes, message: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=message):
        parse_json(text)


def test_a_hook_keeps_its_own_error() -> None:
    def refuse(pairs: list[tuple[str, object]]) -> None:
        raise ValueError("a hook's own")

    with pytest.raises(ValueError, match="a hook's own"):
        parse_json('{"a": 1}', object_pairs_hook=refuse)
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


def test_settings_are_read_as_text_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_bytes(b"a: 1\r\nb: \xc3\xa9\n")
    assert read_text(path) == "a: 1\nb: é\n"
    path.write_bytes(b"x" * whole_file.MAX_BYTES)
    assert len(read_text(path)) == whole_file.MAX_BYTES
    path.write_bytes(b"x" * (whole_file.MAX_BYTES + 1))
    with pytest.raises(OSError, match="too many for settings"):
        read_text(path)


def test_a_pipe_is_a_file_of_settings_too(tmp_path: Path) -> None:
    """Shells make one of a command's output."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a: 1\n",))
    writer.start()
    assert read_text(path) == "a: 1\n"
    writer.join()
