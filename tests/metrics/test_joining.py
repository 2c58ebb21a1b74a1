"""Outputs of models: taken apart, padded, joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ModelError
from windlass.metrics.kept_rows import pad_concat, take_apart, to_numpy


def test_numbers_and_arrays_are_tensors() -> None:
    _, leaves = take_apart({"a": 1.5, "b": np.arange(3), "c": np.float32(2)})
    assert [leaf.tolist() for leaf in leaves] == [1.5, [0, 1, 2], 2.0]


def test_what_is_no_number_is_refused_by_its_place() -> None:
    with pytest.raises(ModelError, match=r"found object at \['a'\]\[1\]"):
        take_apart({"a": (1, object())})
    with pytest.raises(ModelError, match=r"dtype <U1 at \[0\]"):
        take_apart([np.array(["x"])])


@given(
    widths=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=5
    ),
    dtype=st.sampled_from([torch.int64, torch.float32, torch.float64]),
)
def test_joined_blocks_are_padded_in_every_axis(
    widths: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    blocks = [torch.randint(0, 9, shape).to(dtype) for shape in widths]
    joined = pad_concat(blocks)
    assert joined.dtype == dtype
    start = 0
    for block in blocks:
        rows, width, depth = block.shape
        part = joined[start : start + rows]
        assert torch.equal(part[:, :width, :depth], block)
        assert (part[:, width:] == -100).all()
        assert (part[:, :, depth:] == -100).all()
        start += rows
    assert joined.shape == (start, max(w for _, w, _ in widths), max(d for *_, d in widths))


@given(widths=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=5))
def test_joined_blocks_are_those_of_transformers(widths: list[tuple[int, int]]) -> None:
    peer = pytest.importorskip("transformers.trainer_pt_utils")
    blocks = [torch.randint(0, 9, shape) for shape in widths]
    expected = blocks[0]
    for block in blocks[1:]:
        expected = peer.nested_concat(expected, block)
    assert torch.equal(pad_concat(blocks), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_type_without_the_padding_is_not_padded(dtype: torch.dtype) -> None:
    narrow, wide = torch.zeros(1, 2).to(dtype), torch.zeros(1, 3).to(dtype)
    assert pad_concat([wide, wide]).dtype == dtype
    assert pad_concat([narrow, wide], padding=0).tolist() == [[0] * 3] * 2
    with pytest.raises(ModelError, match=f"batches of {dtype} differ in their widths, and -100"):
        pad_concat([narrow, wide])


def test_scalars_are_rows_and_types_are_promoted() -> None:
    joined = pad_concat([torch.tensor(1), torch.tensor([2.5])])
    assert joined.tolist() == [1.0, 2.5]


def test_different_numbers_of_axes_are_refused() -> None:
    with pytest.raises(ModelError, match="number of axes"):
        pad_concat([torch.ones(1, 1), torch.ones(1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_lacks_become_float32(dtype: torch.dtype) -> None:
    assert to_numpy(torch.ones(2).to(dtype)).dtype == np.float32
    assert to_numpy(torch.ones(1, dtype=torch.float16)).dtype == np.float16
