"""A world of one: nothing to wrap, nothing to wait for. Several ranks are tested in tests/dist."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from windlass.transforms.alone import Alone


def test_a_bare_model_needs_no_synchronisation() -> None:
    module = nn.BatchNorm1d(3)
    alone = Alone(module)
    assert alone.model is alone.module is module
    for last in (True, False):
        assert isinstance(alone.micro(last), contextlib.nullcontext)
    before = {name: value.clone() for name, value in module.named_buffers()}
    alone.share_buffers()
    with alone.buffers_of_first_rank():
        module.running_mean.add_(1.0)  # what evaluation does to a bare model is its own business
    assert torch.equal(module.running_mean, before["running_mean"] + 1.0)
    assert alone.own.state_dict() == {}
    ended: list[str] = []
    alone.at_release += [lambda: ended.append("first"), lambda: ended.append("last")]
    alone.release()
    assert ended == ["last", "first"]


def test_the_norm_is_torchs() -> None:
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert torch.equal(Alone(module).total_norm(gradients), nn.utils.get_total_norm(gradients))
    assert Alone(module).total_norm([]) == 0
