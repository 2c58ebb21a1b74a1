"""Groups for the loop, read one ahead, each with its denominator over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from windlass.core.errors import DataError
from windlass.core.types import State
from windlass.data.group import Group, GroupSource
from windlass.dist.gang import Gang
from windlass.dist.lockstep import Lockstep, Round
from windlass.metrics.tokens import rows


class _Counted(NamedTuple):
    """A group of this rank, with the targets and samples of each of its micro-batches."""

    group: Group
    targets: list[float]
    samples: list[int]


@dataclass(slots=True)
class UpdateBatch:
    """One update's data on this rank, with its weight over all ranks.

    Attributes:
        targets, samples: of each micro-batch here.
        denominator, total_samples, tokens, positions: sums over all ranks; tokens as the configuration counts them,
            positions with padding.
        last: no rank has a further update in this epoch.
        signals: signals of all ranks when this was fetched, summed; the same on all ranks.
    """

    group: Group
    targets: list[float]
    samples: list[int]
    denominator: float
    total_samples: float
    tokens: float
    positions: float
    last: bool
    signals: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """How batches are counted, all on the host.

    `inspect` sees the first group before anything of it is counted: what the counts mean may depend on it. If it
    returns a number, it is called again with the same samples in that many micro-batches.
    `signals` are numbers that this rank sends to the others with the counts, so agreeing costs nothing.
    """

    targets: Callable[[Any], float]
    tokens: Callable[[Any], int]
    positions: Callable[[Any], int]
    inspect: Callable[[Group], int | None]
    signals: Callable[[], Sequence[float]] = tuple


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
        in_step: every rank makes equally many micro-batches of an update, because every forward needs all ranks. A rank
            with fewer repeats its first one, without weight: it counts no target and no sample.
    """

    def __init__(
        self, source: GroupSource, accumulation: int, counts: Counts, gang: Gang, in_step: bool = False
    ) -> None:
        self._source, self._accumulation, self._counts, self._gang = source, accumulation, counts, gang
        self._in_step = in_step
        self._inspected = False
        self._position: State = {}
        self._groups: Iterator[Group] = iter(())
        self._rounds = Lockstep[_Counted](gang)
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

    def epoch(self, number: int) -> Generator[UpdateBatch, None, None]:
        """The updates that are left of epoch `number`."""
        self._fetch(self._open(number))
        try:
            while self._rounds.under_way:
                yield self._take()
        finally:
            self._rounds.close()  # the epoch may be left early, on all ranks
            self._groups = iter(())  # workers that read for this epoch alone end with it

    def again(self, accumulation: int) -> UpdateBatch:
        """Read the last update again, in this many micro-batches, as the source cuts them now. In a world of one."""
        self._rounds.close()
        self._position_after = self._position_before
        self._reopen(accumulation)
        self._fetch(None)
        return self._take()

    def _take(self) -> UpdateBatch:
        """Return the update that was fetched ahead, and start fetching the next one."""
        current = self._update_batch(self._rounds.end())
        self._position_before, self._position_after = self._position_after, current.group.position
        self._fetch(None if current.last else current.group)
        return current

    def _open(self, number: int) -> Group | None:
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

    def _fetch(self, spare: Group | None) -> None:
        """Read and count the next group, or `spare` as a filler if this rank has none left; begin to sum the counts."""
        group = next(self._groups, None)
        if group is None:
            if spare is None:
                return
            group = replace(spare, batches=spare.batches[:1], ids=[[]], filler=True, last_in_epoch=True)
        if not self._inspected:
            group = self._inspect(group)
        counts = self._counts
        if group.filler:
            targets, samples, tokens, positions = [0.0] * len(group.batches), [0] * len(group.batches), 0, 0
        else:
            targets = [counts.targets(batch) for batch in group.batches]
            # The ids are exact; a batch of joined sequences, for example, is one row.
            samples = [len(i) or rows(b) for i, b in zip(group.ids, group.batches, strict=True)]
            tokens = sum(map(counts.tokens, group.batches))
            positions = sum(map(counts.positions, group.batches))
        signals = counts.signals()
        # The sums are the numbers of ranks that have a k-th micro-batch, and show how many the longest has.
        present = [float(len(group.batches) > k) for k in range(self._accumulation)] if self._in_step else []
        totals = [sum(targets), sum(samples), tokens, positions]
        self._rounds.begin(
            _Counted(group, targets, samples), not group.last_in_epoch, [*totals, *present, *signals]
        )

    def _inspect(self, group: Group) -> Group:
        """Return the first group, in smaller micro-batches if `inspect` requests them."""
        while (accumulation := self._counts.inspect(group)) is not None:
            self._reopen(accumulation)
            group = next(self._groups)
        self._inspected = True
        return group

    def _update_batch(self, summed: Round[_Counted]) -> UpdateBatch:
        group, targets, samples = summed.item
        weight, total, tokens, positions, *more = summed.sums
        if group.samples and 0 < summed.going_on < self._gang.size:
            raise DataError(_ENDS_APART.format(self._gang.size - summed.going_on, self._gang.size))
        width = self._accumulation if self._in_step else 0
        present, signals = more[:width], more[width:]
        missing = sum(ranks > 0 for ranks in present) - len(group.batches) if present else 0
        if missing > 0:
            # Copies: a training step may take labels out of its batch.
            again = [copy.copy(group.batches[0]) for _ in range(missing)]
            group = replace(group, batches=[*group.batches, *again], ids=[*group.ids, *([] for _ in again)])
            targets, samples = [*targets, *[0.0] * missing], [*samples, *[0] * missing]
        return UpdateBatch(
            group, targets, samples, weight, total, tokens, positions, not summed.going_on, signals
        )
