"""Packing a stream: nothing is lost, and a pass continues after any row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from windlass.config.plan import DataPlan
from windlass.core.errors import DataError
from windlass.data.batch_reader import PassRequest
from windlass.data.stream import RowCutter, SharedStream
from windlass.text.packed_stream import PackedStream
from windlass.text.packing import STRATEGIES

Lengths = st.lists(st.integers(0, 20), max_size=40)


class Documents(IterableDataset[dict[str, list[int]]]):
    """Documents of given lengths whose tokens count up; with the state of a pass."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.at, self.start, self.epoch = lengths, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        self.at, self.start = self.start, 0
        while self.at < len(self.lengths):
            begin = sum(self.lengths[: self.at]) + 1000 * self.epoch
            self.at += 1
            yield {"input_ids": [*range(begin, begin + self.lengths[self.at - 1])]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Stateless(Documents):
    state_dict = None  # type: ignore[assignment]
    load_state_dict = None  # type: ignore[assignment]


def _plain(rows: Any) -> list[dict[str, list[int]]]:
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


@given(Lengths, st.sampled_from(STRATEGIES), st.integers(1, 4))
def test_nothing_is_lost_and_borders_are_right(lengths: list[int], strategy: str, open_rows: int) -> None:
    rows = _plain(PackedStream(Documents(lengths), 8, strategy, open_rows))
    tokens = [t for row in rows for t in row["input_ids"]]
    starts = np.cumsum([0, *lengths]).tolist()
    kept = [t for a, n in zip(starts, lengths, strict=False) for t in range(a, a + min(n, 8))]
    assert sorted(tokens) == (kept if strategy == "bfd" else [*range(sum(lengths))])
    assert all(len(row["input_ids"]) <= 8 for row in rows)
    if strategy == "wrapped":
        assert tokens == sorted(tokens)
        assert all(len(row["input_ids"]) == 8 for row in rows[:-1])
        return
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        ends = np.cumsum(row["seq_lengths"]).tolist()
        for end, size in zip(ends, row["seq_lengths"], strict=True):
            piece = row["input_ids"][end - size : end]
            assert piece == [*range(piece[0], piece[0] + size)]


@given(Lengths, st.sampled_from(STRATEGIES), st.sampled_from([Documents, Stateless]), st.data())
def test_a_pass_continues_after_any_row(lengths: list[int], strategy: str, kind: Any, data: Any) -> None:
    whole = _plain(PackedStream(kind(lengths), 8, strategy, 3))
    stop = data.draw(st.integers(0, len(whole)))
    first = PackedStream(kind(lengths), 8, strategy, 3)
    rows = iter(first)
    begun = _plain(next(rows) for _ in range(stop))
    resumed = PackedStream(kind(lengths), 8, strategy, 3)
    resumed.load_state_dict(first.state_dict())
    assert begun + _plain(resumed) == whole
    assert _plain(resumed) == whole, "the next pass begins at the first document"


def test_a_position_that_was_loaded_is_saved_before_the_first_row() -> None:
    documents = [{"input_ids": [number] * (1 + number % 5)} for number in range(40)]
    stream = PackedStream(documents, 8)
    rows = iter(stream)
    for _ in range(4):
        next(rows)
    saved = stream.state_dict()
    resumed = PackedStream(documents, 8)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved


def test_documents_that_lost_their_state_are_read_up_to_the_position() -> None:
    lengths = [5, 3, 7, 8, 2, 6, 4, 4]
    first = PackedStream(Documents(lengths), 8)
    rows = iter(first)
    next(rows)
    again = PackedStream(Stateless(lengths), 8)
    again.load_state_dict(first.state_dict())
    assert _plain(again) == _plain(rows)


def test_few_rows_stay_open() -> None:
    stream = PackedStream(Documents([5] * 10), 8, open_rows=2)
    next(iter(stream))
    assert len(stream.state_dict()["open"]) == 2
    first = next(iter(PackedStream(Documents([4, 7, 6]), 8, open_rows=2)))
    assert first["seq_lengths"].tolist() == [7], "the fullest row leaves, which wastes least"


def test_epochs_reach_the_documents() -> None:
    stream = PackedStream(Documents([8]), 8)
    stream.set_epoch(2)
    assert _plain(stream)[0]["input_ids"][0] == 2000


@pytest.mark.parametrize(
    "bad", [{"input_ids": [1, 2], "labels": [1]}, {"input_ids": 3}, {}, {"input_ids": [1], "labels": [1]}]
)
def test_other_columns_and_those_of_other_lengths_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="document 1 of the stream"):
        list(PackedStream([{"input_ids": [1]}, bad], 8))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", [Documents, Stateless])
def test_ranks_read_one_stream_and_continue_it(world: int, kind: Any) -> None:
    lengths = [5, 3, 7, 2, 8, 6, 1, 4, 4, 3, 7, 5, 2, 6, 1] * 2
    whole = [row["input_ids"] for row in _plain(PackedStream(kind(lengths), 8))]
    total = len(whole) - len(whole) % world

    def rows(wanted: PassRequest) -> tuple[list[list[int]], Any]:
        per_rank, bookmark = [], None
        for rank in range(world):
            collate = lambda samples: [sample["input_ids"].tolist() for sample in samples]  # noqa: E731
            stream = PackedStream(kind(lengths), 8)
            reader = SharedStream(RowCutter(stream, collate, DataPlan(), world, world, rank), DataPlan())
            batches = list(reader.read(wanted))
            per_rank.append([row for batch in batches if not batch.filler for row in batch.batch])
            bookmark = batches[1].bookmark
        joined = [row for row in itertools.chain(*itertools.zip_longest(*per_rank)) if row is not None]
        return joined, bookmark

    first, bookmark = rows(PassRequest(0))
    assert first[:total] == whole[:total]
    start = bookmark["position"]
    again, _ = rows(PassRequest(0, start, bookmark))
    assert again[: total - start] == whole[start:total]
