"""The order in which batches of several ranks are joined."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.dist.gang import Gang
from windlass.metrics.kept_rows import BatchOrder, OrderLog, RowStore


def order_of(*ranks: list[list[int]]) -> BatchOrder:
    counts = [[len(batch) for batch in batches] for batches in ranks]
    return BatchOrder(counts, [torch.tensor([i for batch in batches for i in batch]) for batches in ranks])


@given(st.permutations(range(12)), st.integers(1, 12))
def test_every_row_has_one_place_and_places_follow_the_dataset(ids: list[int], size: int) -> None:
    batches = [ids[i : i + size] for i in range(0, 12, size)]
    order = order_of(batches[::2], batches[1::2])
    rows = order.rows(order.counts)
    for rank, ranked in enumerate((batches[::2], batches[1::2])):
        for batch, place in zip(ranked, rows[rank], strict=True):
            assert place.tolist() == batch


def test_repeated_positions_keep_all_their_rows() -> None:
    order = order_of([[3, 1]], [[1]])
    assert [place.tolist() for rank in order.rows([[2], [1]]) for place in rank] == [[2, 0], [1]]


def test_blocks_that_are_no_samples_follow_their_batches() -> None:
    order = order_of([[0, 1], [4]], [[2, 3]])
    assert order.batches() == [(0, 0), (1, 0), (0, 1)]
    assert order.rows([[5, 1], [0]]) == [[slice(0, 5), slice(5, 6)], [slice(5, 5)]]


def test_without_positions_batches_come_in_turn() -> None:
    assert BatchOrder([[2, 2], [2]], None).batches() == [(0, 0), (1, 0), (0, 1)]


def test_one_batch_without_positions_leaves_all_unknown() -> None:
    log = OrderLog()
    log.add([5], 1)
    log.add([], 2)
    assert log.exchange(Gang()) == BatchOrder([[1, 2]], None)


def test_a_store_keeps_no_more_than_what_it_was_given() -> None:
    store = RowStore("predictions")
    whole = torch.zeros(1000, 4)
    store.add(whole[:, 0][:2])
    assert store._blocks[0][0].untyped_storage().nbytes() == 8
