"""What is called at the end of a backward, whichever way the backward is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.transforms.averaging import AfterBackward


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.fixture
def seen(layer: nn.Linear) -> list[bool]:
    """For each call, whether both gradients were complete."""
    return []


@pytest.fixture
def after(layer: nn.Linear, seen: list[bool]) -> AfterBackward:
    return AfterBackward(
        layer.parameters(), lambda: seen.append(all(p.grad is not None for p in layer.parameters()))
    )


def _backward(layer: nn.Linear) -> None:
    layer(torch.ones(1, 2)).sum().backward()


def test_once_with_all_gradients(layer: nn.Linear, after: AfterBackward, seen: list[bool]) -> None:
    _backward(layer)
    assert seen == [True]
    _backward(layer)
    assert seen == [True, True]
    after.release()
    _backward(layer)
    assert seen == [True, True]


def test_held_also_in_an_inner_context(layer: nn.Linear, after: AfterBackward, seen: list[bool]) -> None:
    with after.held(), after.held(False):
        _backward(layer)
    assert seen == []
    with after.held(False):
        _backward(layer)
    assert seen == [True]


def test_a_backward_that_failed_keeps_no_later_one_from_it(
    layer: nn.Linear, after: AfterBackward, seen: list[bool]
) -> None:
    def fail(gradient: Any) -> None:
        raise RuntimeError("out of memory")

    start = torch.ones(1, 2, requires_grad=True)
    start.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        (layer(start * 1) + start * 1).sum().backward()
    assert seen == []
    _backward(layer)
    assert seen == [True]


def test_a_parameter_that_is_trained_later(seen: list[bool]) -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    AfterBackward(layer.parameters(), lambda: seen.append(True))
    assert not any(p.requires_grad for p in layer.parameters())
    layer.requires_grad_(True)
    _backward(layer)
    assert seen == [True]
