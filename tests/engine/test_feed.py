"""Groups one ahead, counted on the host, with the sums over ranks that their update needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from windlass.core.types import State
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang
from windlass.dist.sums import Pending
from windlass.engine.feed import Counts, Feed, FeedHooks


class Source:
    """Three groups an epoch; writes down what is asked of it."""

    def __init__(self, trace: list[str], filler: bool = False) -> None:
        self.trace, self.filler, self.at = trace, filler, 0
        self.batch = lambda: {"x": torch.ones(2, 4)}

    def groups(self, accumulation: int) -> Iterator[UpdateBatch]:
        for number in range(3):
            self.trace.append(f"fetch {number}")
            batches = [self.batch() for _ in range(accumulation)]
            filler = self.filler and number == 2
            yield UpdateBatch(
                batches, [[0, 1]] * accumulation, 4, self.at, number == 2, filler, {"next": number + 1}
            )

    def groups_per_epoch(self, accumulation: int) -> int | None:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self.at = epoch

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        self.trace.append(f"restore {state}")


class Doubling(Gang):
    """Two ranks with the same data."""

    def __init__(self, trace: list[str]) -> None:
        super().__init__()
        self._trace, self.size = trace, 2

    def start_sum(self, values: list[float]) -> Pending:
        self._trace.append(f"sum {values}")
        return super().start_sum([2 * value for value in values])


def feed_of(trace: list[str], **options: Any) -> Feed:
    return Feed(Source(trace, **options), 2, Doubling(trace))


class Hooks(FeedHooks):
    counts = Counts(targets=lambda batch: 3.0, inputs=lambda batch: (5, batch["x"].numel()))

    def __init__(self, trace: list[str]) -> None:
        self._trace = trace

    def inspect(self, group: UpdateBatch) -> None:
        self._trace.append("inspect")


def updates_of(feed: Feed, epoch: int, trace: list[str] | None = None) -> Iterator[UpdateBatch]:
    """The updates of an epoch, as a loop takes them."""
    with contextlib.closing(feed):
        while (update := feed.take(epoch, Hooks([] if trace is None else trace))) is not None:
            yield update


def test_a_group_is_fetched_before_the_one_ahead_of_it_is_used() -> None:
    trace: list[str] = []
    for number, _ in enumerate(updates_of(feed_of(trace), 0, trace)):
        trace.append(f"use {number}")
    steps = [line for line in trace if not line.startswith("sum")]
    assert steps == ["fetch 0", "inspect", "fetch 1", "use 0", "fetch 2", "use 1", "use 2"]


class Waited(Gang):
    """Notes which exchanges were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.waited, self.size = 0, 0, 2

    def start_sum(self, values: list[float]) -> Pending:
        self.begun += 1
        gang, done = self, super().start_sum([2 * value for value in values])

        class Noted:
            def wait(self) -> list[float]:
                gang.waited += 1
                return done.wait()

        return Noted()


def test_an_epoch_left_early_does_not_wait_for_the_exchange_that_was_begun() -> None:
    """After an error other ranks may never join it."""
    gang = Waited()
    feed = Feed(Source([]), 1, gang)
    feed.take(0, Hooks([]))
    feed.close()
    assert (gang.begun, gang.waited) == (2, 1)


def test_counts_are_of_this_rank_and_of_all() -> None:
    updates = list(updates_of(feed_of([]), 4))
    assert [update.epoch for update in updates] == [4, 4, 4]
    for update in updates:
        assert (update.targets, update.samples) == ([3.0, 3.0], [2, 2])
        totals = update.denominator, update.total_samples, update.tokens, update.positions
        assert totals == (12.0, 8.0, 20.0, 32.0)


def test_samples_are_counted_by_their_ids_where_these_are_known() -> None:
    """A batch of joined sequences is one row, and a batch of an unknown kind has none to count."""
    feed = feed_of([])
    feed._source.batch = lambda: {"x": torch.ones(1, 9), "first": torch.tensor(3)}  # type: ignore[attr-defined]
    assert next(updates_of(feed, 0)).samples == [2, 2]


def test_a_filler_counts_nothing() -> None:
    *_, last = updates_of(feed_of([], filler=True), 0)
    assert (last.targets, last.samples) == ([0.0, 0.0], [0, 0])
    assert (last.denominator, last.total_samples, last.tokens, last.positions) == (0, 0, 0, 0)


def test_the_first_group_is_inspected_once() -> None:
    trace: list[str] = []
    feed = feed_of(trace)
    for epoch in range(2):
        list(updates_of(feed, epoch, trace))
    assert trace.count("inspect") == 1


def test_an_empty_position_is_no_position() -> None:
    trace: list[str] = []
    feed = feed_of(trace)
    feed.restore({})
    feed.restore({"next": 2})
    assert trace == ["restore {'next': 2}"]
    assert feed.groups_per_epoch == 3


class Shorter(Source):
    """One micro-batch fewer than an update may have."""

    def groups(self, accumulation: int) -> Iterator[UpdateBatch]:
        return super().groups(accumulation - 1)


class LongerElsewhere(Gang):
    """Another rank has three micro-batches, without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def start_sum(self, values: list[float]) -> Pending:
        going_on, *counts = values[:5]
        return super().start_sum([2 * going_on, *counts, *(value + 1 for value in values[5:])])


def test_in_step_a_rank_with_fewer_micro_batches_runs_along_with_what_weighs_nothing() -> None:
    together = next(updates_of(Feed(Shorter([]), 3, LongerElsewhere(), in_step=True), 0))
    assert (together.targets, together.samples) == ([3.0, 3.0, 0.0], [2, 2, 0])
    own, again = together.batches[0], together.batches[2]
    assert own is not again
    assert torch.equal(own["x"], again["x"])
    assert len(together.ids) == 3

    apart = next(updates_of(Feed(Shorter([]), 3, LongerElsewhere()), 0))
    assert len(apart.batches) == 2
