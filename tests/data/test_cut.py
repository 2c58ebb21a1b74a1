from hypothesis import given
from hypothesis import strategies as st

from windlass.data.cut import cut_rows, share


@given(count=st.integers(0, 200), world=st.integers(1, 9))
def test_shares_cover_everything_once_and_differ_by_one_at_most(count: int, world: int) -> None:
    parts = [share(count, world, rank) for rank in range(world)]
    assert [i for low, high in parts for i in range(low, high)] == list(range(count))
    sizes = [high - low for low, high in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(count=st.integers(1, 120), micro=st.integers(1, 5), world=st.integers(1, 5))
def test_every_rank_has_work_where_there_is_a_sample_for_it(count: int, micro: int, world: int) -> None:
    cuts = [cut_rows(list(range(count)), micro, world, rank) for rank in range(world)]
    assert sorted(i for batches in cuts for ids in batches for i in ids) == list(range(count))
    assert sum(bool(batches) for batches in cuts) == min(count, world)
    assert all(0 < len(ids) <= micro for batches in cuts for ids in batches)


def test_only_the_last_row_is_short() -> None:
    ids = list(range(11))
    assert cut_rows(ids, 2, 2, 0) == [[0, 1], [4, 5], [8, 9]]
    assert cut_rows(ids, 2, 2, 1) == [[2, 3], [6, 7], [10]]
