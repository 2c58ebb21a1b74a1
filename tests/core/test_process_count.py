"""The number of processes that a script's loss sees: it computes like any other, and notes what scales a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.core.process_count import CountUse, process_count, watched_process_count

Use = Callable[[Tensor, int], Any]
SCALES: dict[str, Use] = {
    "times": lambda x, n: x * n,
    "times, from the left": lambda x, n: n * x,
    "in place": lambda x, n: x.clone().mul_(n),
    "divided": lambda x, n: x / n,
    "divided, by a function": lambda x, n: torch.div(x, n),
    "times a part": lambda x, n: x * (1 / n),
    "times a quotient": lambda x, n: x * max(n // 2, 1),
}
OTHER: dict[str, Use] = {
    "view": lambda x, n: x.view(n, -1),
    "repeat": lambda x, n: x.repeat(n, 1),
    "shape": lambda x, n: torch.zeros((n, 3)) + x.sum(),
    "scale factor": lambda x, n: torch.nn.functional.interpolate(x[None, None], scale_factor=n),
    "dimension": lambda x, n: x.sum(n - 1),
    "slice": lambda x, n: x[:n],
    "no gradient": lambda x, n: x.detach() * n,
}


def used(use: Use) -> tuple[bool, Any, Any]:
    """If the use is noted, its result, and the result of the plain number."""
    x, watch = torch.ones(4, 4, requires_grad=True), CountUse()
    with watched_process_count(watch):
        found = use(x, process_count(2))
    return watch.used, found, use(x, process_count(2))


@pytest.mark.parametrize("name", SCALES)
def test_what_scales_a_tensor_with_a_gradient_is_noted(name: str) -> None:
    was_used, found, plain = used(SCALES[name])
    assert was_used
    assert torch.equal(found, plain)


@pytest.mark.parametrize("name", OTHER)
def test_what_does_not_is_not(name: str) -> None:
    was_used, found, plain = used(OTHER[name])
    assert not was_used
    assert torch.equal(found, plain)


def test_an_error_of_pytorch_for_a_size_names_the_way_out() -> None:
    with pytest.raises(TypeError) as caught, watched_process_count(CountUse()):
        torch.zeros(process_count(2), 3)
    assert any("int(num_processes)" in note for note in caught.value.__notes__)
