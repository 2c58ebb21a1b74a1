"""Bytes of modules, compared with accelerate's."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import modeling as reference
from accelerate.utils.dataclasses import CustomDtype
from tests.compat.big_models import Model
from torch import nn

from windlass.compat.big_models.big_model import init_empty_weights
from windlass.compat.big_models.device_memory import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
)


@pytest.mark.parametrize("dtype", [None, torch.float16, "bfloat16", torch.float64])
@pytest.mark.parametrize("special", [None, {"position": torch.float16, "blocks.0.scale": "float16"}])
def test_sizes_are_those_of_the_reference(
    dtype: torch.dtype | None, special: dict[str, torch.dtype] | None
) -> None:
    model = Model()
    assert compute_module_sizes(model, dtype, special) == dict(
        reference.compute_module_sizes(model, dtype, special)
    )
    assert compute_module_total_buffer_size(model, dtype) == reference.compute_module_total_buffer_size(
        model, dtype
    )


def test_sizes_need_no_data() -> None:
    with init_empty_weights(include_buffers=True):
        empty = Model()
    assert compute_module_sizes(empty) == compute_module_sizes(Model())
    assert calculate_maximum_sizes(empty) == reference.calculate_maximum_sizes(Model())


def test_a_tied_weight_counts_once() -> None:
    tied, apart = compute_module_sizes(Model()), compute_module_sizes(Model(tied=False))
    assert apart[""] - tied[""] == apart["embedding.weight"]


def test_truth_values_take_a_byte_each_as_torch_stores_them() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(8, dtype=torch.bool))
    assert compute_module_sizes(module) == {"": 8, "mask": 8}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float64,
        torch.complex64,
        *CustomDtype,
    ],
)
def test_bytes_of_a_number(dtype: torch.dtype | CustomDtype) -> None:
    assert dtype_byte_size(dtype) == reference.dtype_byte_size(dtype)


def test_an_empty_model_takes_nothing() -> None:
    assert calculate_maximum_sizes(nn.Identity()) == (0, (0, []))
