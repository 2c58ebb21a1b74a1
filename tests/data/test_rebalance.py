from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from windlass.data.rebalance import balanced_batches


def cost(members: list[int], lengths: list[int]) -> float:
    longest = max((lengths[i] for i in members), default=0)
    return len(members) * (longest + 0.001 * longest**2)


def best_possible(lengths: list[int], groups: int) -> float:
    """The smallest dearest group over all contiguous cuts of the samples by falling length, tried one by one."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    inner = itertools.combinations(range(1, len(order)), groups - 1)
    cuts = ([0, *cut, len(order)] for cut in inner)
    return min(max(cost(order[a:b], lengths) for a, b in itertools.pairwise(cut)) for cut in cuts)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    rows=st.integers(1, 2),
    world=st.integers(1, 3),
)
def test_every_sample_once_everyone_busy_and_no_cut_is_cheaper(
    lengths: list[int], rows: int, world: int
) -> None:
    dealt = balanced_batches(list(range(len(lengths))), lengths, rows, world)
    groups = [members for row in dealt for members in row]
    assert (len(dealt), len(groups)) == (rows, rows * world)
    assert sorted(i for members in groups for i in members) == list(range(len(lengths)))
    assert sum(map(bool, groups)) == min(len(lengths), rows * world)
    prices = [cost(members, lengths) for members in groups]
    assert prices == sorted(prices, reverse=True), "the dearest groups share a row"
    if len(lengths) >= rows * world:
        assert max(prices) <= best_possible(lengths, rows * world) * (1 + 1e-9)


@given(lengths=st.lists(st.integers(0, 1), min_size=4, max_size=12))
def test_samples_without_tokens_do_no_harm(lengths: list[int]) -> None:
    dealt = balanced_batches(list(range(len(lengths))), lengths, 2, 2)
    assert all(members for row in dealt for members in row)
