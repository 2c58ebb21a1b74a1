"""Which samples make the batches of a pass, and how they are divided between ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Numbers, train_loader

from windlass.data.dealt_rows import SampleRows, balanced_batches, share, shares_of
from windlass.data.order import SequentialOrder


@given(count=st.integers(0, 200), world=st.integers(1, 9))
def test_shares_cover_everything_once_and_differ_by_one_at_most(count: int, world: int) -> None:
    parts = [share(count, world, rank) for rank in range(world)]
    assert [i for low, high in parts for i in range(low, high)] == list(range(count))
    sizes = [high - low for low, high in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True) == list(shares_of(count, world))


def _micro_batches(count: int, micro: int, world: int, rank: int, accumulation: int) -> list[list[int]]:
    loader = train_loader(Numbers(count), micro, accumulation, world, rank, order="sequential")
    return [ids for group in loader.groups() if not group.filler for ids in group.ids]


@given(
    count=st.integers(1, 120),
    micro=st.integers(1, 5),
    world=st.integers(1, 5),
    accumulation=st.integers(1, 4),
)
def test_every_rank_has_work_where_there_is_a_sample_for_it(
    count: int, micro: int, world: int, accumulation: int
) -> None:
    shares = [_micro_batches(count, micro, world, rank, accumulation) for rank in range(world)]
    assert sorted(i for batches in shares for ids in batches for i in ids) == list(range(count))
    assert sum(bool(batches) for batches in shares) == min(count, world)
    assert all(0 < len(ids) <= micro for batches in shares for ids in batches)


def test_only_the_last_row_is_short() -> None:
    for accumulation in (1, 2, 3):
        assert _micro_batches(11, 2, 2, 0, accumulation) == [[0, 1], [4, 5], [8, 9]]
        assert _micro_batches(11, 2, 2, 1, accumulation) == [[2, 3], [6, 7], [10]]


def test_a_rank_without_a_sample_in_a_row_has_a_filler_only_if_it_has_none_at_all() -> None:
    (whole,) = train_loader(Numbers(5), 1, 2, 4, 3, order="sequential").groups()
    assert (whole.batches, whole.ids, whole.dealt_samples, whole.filler) == ([[3]], [[3]], 5, False)
    rows = SampleRows(SequentialOrder(5, seed=0), 4, 4, drop_last=False)
    first, second = rows.batches(0, 0, 3)
    assert (first.ids, first.shares, first.filler, first.last) == ([3], (1, 1, 1, 1), False, False)
    assert (second.ids, second.shares, second.filler, second.last) == ([4], (1, 0, 0, 0), True, True)


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
