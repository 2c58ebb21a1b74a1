"""Equality of nests: the same types, keys, dtypes, shapes and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_same(found: Any, wanted: Any) -> None:
    """Fail where two nests of tensors, arrays and plain values differ in type or in bits."""
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), (found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted
