"""Replication in a world of one: nothing to wrap, nothing to wait for. Several ranks are tested in tests/dist."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from windlass.transforms.ddp import buffers_of_first_rank, share_buffers, synchronised


def test_a_bare_model_needs_no_synchronisation() -> None:
    module = nn.BatchNorm1d(3)
    for last in (True, False):
        assert isinstance(synchronised(module, last), contextlib.nullcontext)
    before = {name: value.clone() for name, value in module.named_buffers()}
    share_buffers(module)
    with buffers_of_first_rank(module):
        module.running_mean.add_(1.0)  # what evaluation does to a bare model is its own business
    assert torch.equal(module.running_mean, before["running_mean"] + 1.0)
