"""What a rank sends in each collective of PyTorch, whose arguments are tensors or lists of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.dist.imagined import imagined_job
from windlass.forecast.work import Sent, sent_by

RANKS, NUMBERS = 4, 6
PART = 4 * NUMBERS  # bytes


class Collected(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sent += [found for found in [sent_by(func, args)] if found is not None]
        return func(*args, **(kwargs or {}))


def part() -> Tensor:
    return torch.zeros(NUMBERS)


def parts() -> list[Tensor]:
    return [part() for _ in range(RANKS)]


@pytest.mark.parametrize(
    ("call", "name", "nbytes"),
    [
        (lambda: dist.all_reduce(part()), "all-reduce", 2 * PART * 3 / 4),
        (lambda: dist.all_reduce_coalesced([part(), part()]), "all-reduce", 2 * 2 * PART * 3 / 4),
        (lambda: dist.all_gather(parts(), part()), "all-gather", 3 * PART),
        (lambda: dist.all_gather_into_tensor(torch.cat(parts()), part()), "all-gather", 3 * PART),
        (lambda: dist.reduce_scatter(part(), parts()), "reduce-scatter", 3 * PART),
        (lambda: dist.reduce_scatter_tensor(part(), torch.cat(parts())), "reduce-scatter", 3 * PART),
        (lambda: dist.all_to_all(parts(), parts()), "all-to-all", 3 * PART),
        (lambda: dist.all_to_all_single(torch.cat(parts()), torch.cat(parts())), "all-to-all", 3 * PART),
        (lambda: dist.send(part(), 1), "send", PART),
    ],
)
def test_bytes_of_a_collective(call: Callable[[], Any], name: str, nbytes: float) -> None:
    with imagined_job(RANKS), Collected() as collected:
        call()
    assert collected.sent == [Sent(name, tuple(range(RANKS)), int(nbytes))]
