"""What is sent arrives as it was; what cannot be sent without pickling is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.core.errors import DataError
from windlass.data.parcel import pack, unpack

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
batches = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
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


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"a": [1, {2}]}, r"batch\['a'\]\[1\] is a set"),
        ({1: 2}, "batch is a dict"),
        ([np.zeros(2)], r"batch\[0\] is a ndarray"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
    ],
)
def test_what_cannot_be_sent_is_named(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        pack(batch)
