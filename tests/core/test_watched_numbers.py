"""The numbers that a script's loss sees: they compute like any other, and note what scales a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.core.watched_numbers import NumberUse, micro_batch_count, process_count, watched_numbers

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
    x, watch = torch.ones(4, 4, requires_grad=True), NumberUse()
    with watched_numbers(watch):
        found = use(x, process_count(2))
    return watch.processes, found, use(x, process_count(2))


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
    with pytest.raises(TypeError) as caught, watched_numbers(NumberUse()):
        torch.zeros(process_count(2), 3)
    assert any("int(num_processes)" in note for note in caught.value.__notes__)


def divisor(use: Use) -> int | None:
    """What a scalar was divided by, as far as it was noted."""
    x, watch = torch.ones((), requires_grad=True), NumberUse()
    with watched_numbers(watch):
        found = use(x, micro_batch_count(4))
    assert torch.equal(found, use(x, 4))
    assert not watch.processes
    return watch.divisor(found)


@pytest.mark.parametrize(
    ("expected", "use"),
    [
        (4, lambda x, n: x / n),
        (4, lambda x, n: torch.div(x, n)),
        (4, lambda x, n: torch.div(x, other=n)),
        (4, lambda x, n: x.clone().div_(n)),
        (4, lambda x, n: (x * 3).sum() / n),
        (16, lambda x, n: x / n / n),
        # a part of the loss, another number, another computation
        (None, lambda x, n: x + x / n),
        (None, lambda x, n: x / n * 2),
        (None, lambda x, n: x / (n + 1)),
        (None, lambda x, n: x * n),
        (None, lambda x, n: n / x),
        (None, lambda x, n: torch.div(x, n, rounding_mode="floor")),
        (None, lambda x, n: x.view(1).repeat(n) / 2),
    ],
)
def test_the_division_of_a_whole_loss_by_micro_batches_is_noted(expected: int | None, use: Use) -> None:
    assert divisor(use) == expected


def test_a_product_with_the_number_of_processes_is_watched_as_that_number() -> None:
    x, watch = torch.ones((), requires_grad=True), NumberUse()
    with watched_numbers(watch):
        for ranks in (micro_batch_count(4) * process_count(2), process_count(2) * micro_batch_count(4)):
            found = x / ranks
            assert watch.processes
            assert watch.divisor(found) is None
            watch.processes = False
