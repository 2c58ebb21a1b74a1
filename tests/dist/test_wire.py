"""What is sent arrives as it was; what cannot be sent without pickling is refused by name.

Real ranks: `test_operations.py`, and `tests/engine/evaluate_ranks.py` for streams.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.core.errors import DataError
from windlass.dist.gang import Gang
from windlass.dist.wire import _runs, pack, unpack

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
tensors = st.builds(
    lambda dtype, shape: (torch.arange(int(np.prod(shape))) % 5).reshape(shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.builds(
    lambda dtype, shape: (np.arange(int(np.prod(shape))) % 5).reshape(shape).astype(dtype),
    st.sampled_from(["bool", "int8", "float16", "float64", "complex64", "U3", "S2"]),
    st.lists(st.integers(0, 4), max_size=3),
)
batches = st.recursive(
    tensors
    | arrays
    | arrays.filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0])
    | st.binary(max_size=5)
    | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(plain, plain) | st.just("$tuple"), inner, max_size=3)
        | st.sets(plain, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


@settings(deadline=None, max_examples=150)
@given(batches, plain)
def test_what_is_packed_comes_out_again(batch: Any, notes: Any) -> None:
    arrived, told = unpack(pack(batch, notes).clone())
    assert same(batch, arrived)
    assert told == notes


def test_views_and_strides_do_not_matter() -> None:
    turned = torch.arange(12.0).reshape(3, 4).T[1:]
    arrived, _ = unpack(pack({"x": turned}))
    assert torch.equal(arrived["x"], turned)
    arrived["x"].add_(1)


def test_received_tensors_and_arrays_can_be_written() -> None:
    arrived, _ = unpack(pack({"t": torch.zeros(2), "a": np.zeros(2)}))
    arrived["t"] += 1
    arrived["a"] += 1
    assert (arrived["t"].tolist(), arrived["a"].tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_members_of_enumerations_travel_as_their_values_and_paths_as_paths() -> None:
    class Color(enum.StrEnum):
        RED = "red"

    arrived, _ = unpack(pack([Color.RED, Path("a/b"), torch.Size([2]), float("inf")]))
    assert arrived == ["red", Path("a/b"), (2,), float("inf")]
    assert type(arrived[0]) is str


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"a": [1, object()]}, r"batch\['a'\]\[1\] is a object"),
        ({"a": {object(): 2}}, r"a key of batch\['a'\] is a object"),
        ([np.array([object()])], r"batch\[0\] is an array of dtype object"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "only dense tensors"),
    ],
)
def test_what_cannot_be_sent_is_named(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        pack(batch, name="batch")


def test_a_world_of_one_gets_its_own_tensors_back_and_lets_go() -> None:
    stock = [torch.ones(1), torch.zeros(2)]
    first, second = stock
    assert list(Gang().stream(stock)) == [(0, 0, first), (0, 1, second)]
    assert stock == []


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_messages_cover_everything_within_the_limit(sizes: list[int], limit: int) -> None:
    runs = list(_runs(sizes, limit))
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[i] for i in run) <= limit for run in runs)


def message(described: Any, contents: bytes = bytes(64)) -> torch.Tensor:
    """A message with this description of its value, which `pack` need not make."""
    text = json.dumps([None, described]).encode()
    head = len(text).to_bytes(8, "little") + text
    return torch.frombuffer(bytearray(head + bytes(-len(head) % 16) + contents), dtype=torch.uint8)


@pytest.mark.parametrize(
    "described",
    [
        {"$array": ["O", [1], False]},  # its bytes would be taken for the addresses of objects
        {"$array": ["V8,O", [1], False]},
        {"$array": ["<f8", [10**6], False]},
        {"$tensor": ["load", [1]]},
        {"$map": [1]},
        {"$set": [[1]]},
    ],
)
def test_a_message_that_is_damaged_is_refused(described: Any) -> None:
    assert unpack(message([1])) == ([1], None)
    with pytest.raises(DataError, match="a message of another process is damaged"):
        unpack(message(described))
