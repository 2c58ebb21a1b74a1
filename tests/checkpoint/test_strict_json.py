from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint import strict_json
from windlass.core.errors import CheckpointError

trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(tree=trees)
def test_round_trip_and_plain_json(tree: Any) -> None:
    data = strict_json.dump(tree, "x")
    assert strict_json.parse(data, "x") == tree == json.loads(data)
    assert data.isascii()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"NaN", b"[Infinity]", b'{"a":1,"a":1}', b"\xff", b"[" * 50_000, b"9" * 5000, b"1 2"]
)
def test_anything_odd_is_one_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"file\.json"):
        strict_json.parse(data, "file.json")


def test_what_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"state\.json would be .* bytes"):
        strict_json.dump({"a": "b" * 10}, "state.json")
