from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Numbers, train_loader

from windlass.data.cut import share, shares_of
from windlass.data.dealt_rows import SampleRows, rank_rows
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
    first, second = rank_rows(rows.rows(0, 0), 3)
    assert (first.ids, first.shares, first.filler, first.last) == ([3], (1, 1, 1, 1), False, False)
    assert (second.ids, second.shares, second.filler, second.last) == ([4], (1, 0, 0, 0), True, True)
