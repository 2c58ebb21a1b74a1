"""Host memory is read in place; anything else is refused."""

from __future__ import annotations

import pytest
import torch

from windlass.core import host


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_it_reads_scalars_and_rows(dtype: torch.dtype) -> None:
    assert host.read(torch.tensor(2, dtype=dtype)) == 2
    assert host.read(torch.tensor([1, 2], dtype=dtype)) == [1, 2]


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor on meta"):
        host.read(torch.zeros((), device="meta"))
