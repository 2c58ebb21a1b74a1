"""Groups for the loop, read one ahead, each with its denominator over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.core.errors import DataError
from windlass.core.run_clock import DATA, EXCHANGE, run_clock
from windlass.core.types import State
from windlass.data.update_batch import GroupSource, UpdateBatch, fill_up
from windlass.dist.beacon import beacon
from windlass.dist.gang import Gang
from windlass.dist.sums import Pending
from windlass.metrics.tokens import rows


@dataclass(frozen=True, slots=True)
class Counts:
    """How batches are counted, all on the host.

    `check` sees every group before it is counted, and raises if the model cannot compute it; None: nothing is checked.
    `inputs` returns the tokens of a batch, as the configuration counts them, and its positions with padding.
    `draw` has a script take the batches of a group, before they are counted; it may change them. None: none does. It
    is called when the group is due, and not one ahead.
    `flops` is a script's own estimate of its floating-point operations; None: it has none.
    `signals` are numbers that this rank sends to the others with the counts, so agreeing costs nothing.
    """

    targets: Callable[[Any], float]
    inputs: Callable[[Any], tuple[int, int]]
    signals: Callable[[], Sequence[float]] = tuple
    check: Callable[[UpdateBatch], None] | None = None
    flops: Callable[[Any], float] | None = None
    draw: Callable[[UpdateBatch], None] | None = None


class FeedHooks:
    """What takes updates from a feed, and is handed over with each request."""

    counts: Counts

    def inspect(self, group: UpdateBatch) -> int | None:
        """Look at the first group before anything of it is counted: what the counts mean may depend on it. If a number
        is returned, this is called again with the same samples in that many micro-batches.
        """
        return None


# Every rank reads the same data if Windlass deals it.
_ENDS_APART = (
    "{} of {} ranks have come to the end of the training data, and the others have more: its samples differ between "
    "ranks, so samples were lost when Windlass dealt them. Make it return all samples on every rank, or override "
    "get_train_dataloader with a loader of each rank's own."
)


class Feed:
    """Fetches a group, counts it on the host, and sums the counts over ranks while the previous update runs.

    Ranks whose own loaders differ in length end an epoch together: a rank without more data takes part with fillers.

    Args:
        all_ranks: one exchange over them carries counts and signals. Of the ranks with the same samples, the first
            sends their counts.
        in_step: every rank makes equally many micro-batches of an update, because every forward needs all ranks. A rank
            with fewer repeats its first one, without weight: it counts no target and no sample.
    """

    def __init__(
        self, source: GroupSource, accumulation: int, all_ranks: Gang, in_step: bool = False
    ) -> None:
        self._source, self._accumulation = source, accumulation
        self._all_ranks, self._sends_counts = all_ranks, all_ranks.over("model").rank == 0
        self._in_step = in_step
        self._inspected, self._clock, self._beacon = False, run_clock(), beacon()
        self._position: State = {}
        self._groups: Iterator[UpdateBatch] = iter(())
        self._epoch: int | None = None  # the one that is read
        # The update that was fetched ahead, its counts, and their sum over ranks, if there are several.
        self._ahead: tuple[UpdateBatch, list[float], Pending | None] | None = None
        # The last update, if the one after it is fetched when it is due.
        self._due_after: UpdateBatch | None = None
        # The source's position before and after the last update.
        self._position_before: State = {}
        self._position_after: State = {}

    @property
    def groups_per_epoch(self) -> int | None:
        """Updates in a whole epoch, None if it is unknown until the stream ends."""
        return self._source.groups_per_epoch(self._accumulation)

    def groups_consumed(self, position: State) -> int | None:
        """How many updates of this run's size the consumed data of `position`'s epoch makes."""
        whole, left = self.groups_per_epoch, self._source.groups_left(position, self._accumulation)
        return None if whole is None or left is None else whole - left

    def restore(self, position: State) -> None:
        """Continue after the last group that was consumed; an empty position is the start of an epoch."""
        self._position = position
        if position:
            self._source.load_state_dict(position)

    def close(self) -> None:
        """End the epoch, with or without data left. The sum that was begun is not waited for: after an error, other
        ranks may never join it.
        """
        self._ahead = self._due_after = None
        self._groups = iter(())  # workers that read for this epoch alone end with it
        self._epoch = None

    def again(self, accumulation: int, hooks: FeedHooks) -> UpdateBatch:
        """Read the last update again, in this many micro-batches, as the source cuts them now. In a world of one."""
        self._ahead = self._due_after = None
        self._position_after = self._position_before
        self._reopen(accumulation)
        self._fetch(None, hooks)
        assert self._epoch is not None
        same = self.take(self._epoch, hooks)
        assert same is not None, "the same samples come again"
        return same

    def take(self, epoch: int, hooks: FeedHooks) -> UpdateBatch | None:
        """Return the next update of those that are left of `epoch`, with its sums over all ranks, and fetch the one
        after it; None if there is none. `close` ends the epoch.
        """
        if self._epoch is None:  # the first update of the epoch: nothing was fetched ahead
            self._epoch = epoch
            self._fetch(self._open(epoch), hooks)
        elif self._due_after is not None:
            spare, self._due_after = self._due_after, None
            self._fetch(spare, hooks)
        if self._ahead is None:
            return None
        (group, sums, pending), self._ahead = self._ahead, None
        if pending is not None:
            before = self._clock.enter(EXCHANGE)
            sums = pending.wait()
            self._clock.enter(before)
        going_on, group.denominator, group.total_samples, group.tokens, group.positions, *more = sums
        if hooks.counts.flops is not None:
            group.flops = more.pop(0)
        group.last = not going_on
        if group.dealt_samples and 0 < going_on < self._all_ranks.size:
            ended = self._all_ranks.size - int(going_on)
            raise DataError(_ENDS_APART.format(ended, self._all_ranks.size))
        if self._in_step:
            fill_up(group, sum(ranks > 0 for ranks in more[: self._accumulation]))
            del more[: self._accumulation]
        group.signals = more
        self._position_before, self._position_after = self._position_after, group.position
        if hooks.counts.draw is not None and not group.last:
            self._due_after = group
        else:
            self._fetch(None if group.last else group, hooks)
        return group

    def _open(self, number: int) -> UpdateBatch | None:
        """Begin the epoch; return a group to use as a filler if the restored position is past this epoch."""
        position, self._position = self._position, {}
        if position.get("epoch", number) <= number:
            self._source.set_epoch(number)
            self._position_after = self._source.state_dict()
            self._groups = self._source.groups(self._accumulation)
            return None
        spare = next(self._source.groups(self._accumulation))
        self._source.load_state_dict(position)
        self._groups = iter(())
        return replace(spare, position=position)

    def _reopen(self, accumulation: int) -> None:
        """Return to the position after the last update, with other micro-batches."""
        self._accumulation = accumulation
        self._source.load_state_dict(self._position_after)
        self._groups = self._source.groups(accumulation)

    def _fetch(self, spare: UpdateBatch | None, hooks: FeedHooks) -> None:
        """Read and count the next group, or `spare` as a filler if this rank has none left; begin to sum the counts."""
        before = self._clock.enter(DATA)
        # As `limited_wait`, with fewer calls: this runs in every update.
        self._beacon.call("read data")
        self._beacon.limited.append("read data")
        try:
            group = next(self._groups, None)
        finally:
            self._beacon.limited.remove("read data")
        self._clock.enter(before)
        if group is None:
            if spare is None:
                return
            group = replace(spare, batches=spare.batches[:1], ids=[[]], filler=True, last_in_epoch=True)
        if hooks.counts.draw is not None:
            hooks.counts.draw(group)
        if not self._inspected:
            group = self._inspect(group, hooks)
        sums = self._count(group, hooks.counts)
        signals = hooks.counts.signals()
        # The sums are the numbers of ranks that have a k-th micro-batch, and show how many the longest has.
        present = [float(len(group.batches) > k) for k in range(self._accumulation)] if self._in_step else []
        going_on = float(not group.last_in_epoch)  # the sum is the number of ranks that have more data
        counts = [going_on, *sums, *present, *signals]
        self._ahead = group, counts, self._all_ranks.start_sum(counts) if self._all_ranks.size > 1 else None

    def _count(self, group: UpdateBatch, counts: Counts) -> list[float]:
        """Count each micro-batch; return the sums over all of them."""
        batches = group.batches
        if group.filler:
            group.targets, group.samples = [0.0] * len(batches), [0] * len(batches)
            return [0.0, 0, 0, 0] + [0.0] * (counts.flops is not None)
        if counts.check is not None:
            counts.check(group)
        group.targets = [counts.targets(batch) for batch in batches]
        # The ids are exact; a batch of joined sequences, for example, is one row.
        group.samples = [len(i) or rows(b) for i, b in zip(group.ids, batches, strict=True)]
        tokens, positions = map(sum, zip(*map(counts.inputs, batches), strict=True))
        sums = [sum(group.targets), sum(group.samples), tokens, positions]
        if counts.flops is not None:
            sums.append(float(sum(map(counts.flops, batches))))
        return sums if self._sends_counts else [0.0] * len(sums)

    def _inspect(self, group: UpdateBatch, hooks: FeedHooks) -> UpdateBatch:
        """Return the first group, in smaller micro-batches if `inspect` requests them."""
        while (accumulation := hooks.inspect(group)) is not None:
            self._reopen(accumulation)
            group = next(self._groups)
            if hooks.counts.draw is not None:
                hooks.counts.draw(group)
        self._inspected = True
        return group
