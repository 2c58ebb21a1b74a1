"""In double precision no tensor of float64 is rounded to fewer bits, in layers that are computed again too."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from windlass.cli.proving.proving_rank import double_precision


def test_float64_is_not_rounded_and_other_dtypes_are_cast() -> None:
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2)
    with double_precision():
        casts = [
            wide.float(), wide.to(torch.float32), wide.to(dtype=torch.bfloat16), wide.type(torch.float16),
            torch.softmax(wide, -1, dtype=torch.float32), torch.nn.functional.softmax(wide, 0, dtype=torch.float32),
        ]  # fmt: skip
        assert {cast.dtype for cast in casts} == {torch.float64}
        assert (narrow.half().dtype, wide.long().dtype) == (torch.float16, torch.int64)
        counted = torch.zeros(2, dtype=torch.float32).scatter_add_(
            0, wide.long(), torch.ones(2).long().to(torch.float32)
        )
        assert counted.dtype == torch.float64
        assert (wide[:, None].float() @ torch.arange(2)[None].float()).dtype == torch.float64
    assert wide.float().dtype == torch.float32


def test_layers_that_are_computed_again_are_in_float64_too() -> None:
    states = torch.full((2,), 0.1, dtype=torch.float64, requires_grad=True)
    with double_precision():
        checkpoint(lambda x: x.float().pow(3).sum(), states, use_reentrant=False).backward()
    assert states.grad is not None
    assert torch.equal(states.grad, 3 * states.detach() ** 2)
