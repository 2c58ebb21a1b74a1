"""Evaluation batches of which ranks have different numbers: three real ranks, and a world of one here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks

from windlass.core.errors import DataError
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.engine.uneven_batches import EvaluationAbandoned, interruptible_batches, pad_uneven_batches


@pytest.mark.dist
def test_three_ranks_go_in_step() -> None:
    on_ranks(3, main)


def test_a_world_of_one_gets_its_own_batches() -> None:
    placed = [([0], "a"), ([1], "b")]
    assert list(pad_uneven_batches(placed, Gang())) == placed
    heard: list[float] = []
    assert list(interruptible_batches("ab", Gang(), lambda: (2.0,), heard.extend)) == ["a", "b"]
    assert heard == [2.0] * 3


# --- what each rank runs ----------------------------------------------------------------------------------------------


def padding(gang: Gang) -> None:
    mine = [([10 * gang.rank + n], {"x": n}) for n in range(gang.rank + 1)]
    came = list(pad_uneven_batches(mine, gang))
    assert came == [*mine, *[(None, {"x": gang.rank})] * (gang.size - gang.rank - 1)]
    assert all(one[1] is not other[1] for one, other in itertools.pairwise(came)), "a step may empty it"
    batches = pad_uneven_batches([([0], {})] if gang.rank else [], gang)
    if gang.rank:
        assert next(batches) == ([0], {})
        batches.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(DataError, match="rank 0 got no evaluation batch"):
            next(batches)


def signals(gang: Gang) -> None:
    """All ranks hear the same sums, at as many exchanges, whatever their numbers of batches."""
    heard: list[float] = []
    batches = interruptible_batches(
        range(gang.rank), gang, lambda: (1.0, gang.rank), lambda s: heard.extend(s)
    )
    assert list(batches) == list(range(gang.rank))
    assert heard == [gang.size, sum(range(gang.size))] * gang.size


def all_leave_together(gang: Gang) -> None:
    seen: list[int] = []

    def agreed(sums: Any) -> None:
        if sums[0]:
            raise EvaluationAbandoned

    def told() -> tuple[float]:
        return (float(gang.rank == 1 and len(seen) == 2),)

    with (
        pytest.raises(EvaluationAbandoned),
        contextlib.closing(interruptible_batches(range(9), gang, told, agreed)) as batches,
    ):
        seen.extend(batches)
    assert seen == [0, 1]


def one_rank_fails(gang: Gang) -> None:
    """In its data, or in what is made of a batch: the others come to the end of theirs."""

    def broken() -> Iterator[int]:
        yield 0
        if gang.rank == 0:
            raise OSError("the disk is gone")
        yield from range(1, 4)

    for batches, fails_in_the_step in ((broken(), False), (iter(range(4)), True)):
        seen = []
        caught = pytest.raises(OSError, match="disk") if gang.rank == 0 else contextlib.nullcontext()
        watched = interruptible_batches(batches, gang, lambda: (), lambda sums: None)
        with caught, contextlib.closing(watched):
            for batch in watched:
                seen.append(batch)
                if fails_in_the_step and gang.rank == 0:
                    raise OSError("the disk is gone")
        assert seen == ([0] if gang.rank == 0 else list(range(4)))


def main() -> None:
    gang = join(world_from_environment(), torch.device("cpu"))
    for check in (padding, signals, all_leave_together, one_rank_fails):
        check(gang)
        gang.barrier()
    leave()
