"""Groups from a loader that a user made: its batches are taken unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from windlass.config.plan import BatchPlan
from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.rng import STREAM_ORDER, STREAM_SAMPLE, derive_seed
from windlass.core.trees import tensors_in
from windlass.core.types import State
from windlass.data.bookmark import checksum, plain_copy
from windlass.data.order import known_length, ordering_parts, own_generators
from windlass.data.seeding import DatasetEpoch, Sandbox, rewind, set_epochs
from windlass.data.skip import skips_unread, with_batch_sampler
from windlass.data.update_batch import UpdateBatch
from windlass.data.workers import START_TIMEOUT, Reader, read_batches

logger, job_logger = get_logger(__name__), get_job_logger(__name__)
_END = object()


class _Entry(NamedTuple):
    """A position in a loader: its own state, or why it has none; and a checksum of the next batch."""

    state: Any
    reason: str
    mark: int | None


_NOWHERE = _Entry(None, "", None)


class ForeignLoader:
    """The engine's view of any iterable of batches: a `DataLoader`, a `StatefulDataLoader`, a list, a class.

    Each rank iterates its own loader, so ranks may have different numbers of batches, and which samples they
    hold is unknown. What the loader draws from the default generators (a `RandomSampler` does) is seeded by
    (seed, epoch, batch number), so that the same batches come again on resume. The position is the number of
    batches taken, and the loader's own state if it has `state_dict`. A `DataLoader` over a map-style dataset, read in
    this process, needs none: the batches before are not fetched. Any other loader is read again up to the position,
    with a warning. In each case the next batch is compared with the one that followed when the state was taken.

    Args:
        loader: yields batches; must begin again each time it is iterated.
        batch: `batch.accumulation` is the default of `groups`.
        seed: the run's data seed.
        longest: batches of the rank that has most; None: of this one.
        start_timeout: seconds after which a worker of the loader that has not started is replaced.
    """

    def __init__(
        self,
        loader: Any,
        batch: BatchPlan,
        seed: int = 42,
        longest: int | None = None,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise DataError(
                f"the training loader ({type(loader).__name__}) cannot be iterated; return a DataLoader."
            )
        self.loader, self.batch, self.seed, self._longest = loader, batch, seed, longest
        self.epoch, self.taken = 0, 0
        self._here, self._restored = _NOWHERE, False
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._sandbox = Sandbox()
        self._reader = Reader(f"training (by a {type(loader).__name__} of the script)", start_timeout)
        self._parts = ordering_parts(loader)
        self._generators = own_generators(loader, *self._parts)
        self._dataset_epoch = DatasetEpoch.of(self.dataset)
        if longest == 0:  # on every rank: epochs of it would be no update, and the run would end without one
            raise DataError(self._nothing())

    @property
    def dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)

    @property
    def num_samples(self) -> int | None:
        """Unknown: a user's loader may shard, drop or repeat samples."""
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches of an epoch on this rank; TypeError if the loader has no length."""
        return len(self.loader)

    def groups_per_epoch(self, accumulation: int | None = None) -> int | None:
        count = self._longest or known_length(self.loader)
        if count is None:
            return None
        return -(-count // (accumulation or self.batch.accumulation))

    def groups_left(self, position: State, accumulation: int) -> int | None:
        whole = self.groups_per_epoch(1)
        return None if whole is None else max(-(-(whole - self._taken_by(position)) // accumulation), 0)

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        """A `state_dict` as of so many updates of `epoch`: the loader is read again up to there."""
        return {
            "seed": self.seed,
            "epoch": epoch,
            "batches": updates * accumulation,
            "world": self.batch.ranks,
        }

    def groups(self, accumulation: int | None = None) -> Iterator[UpdateBatch]:
        epoch, size = self.epoch, accumulation or self.batch.accumulation
        batches = self._batches(epoch)
        coming = next(batches, _END)
        if coming is _END:
            raise DataError(self._nothing())
        while coming is not _END:
            taken: list[Any] = []
            while coming is not _END and len(taken) < size:
                taken.append(coming)
                if len(taken) == size:
                    state, reason = self._own_state()  # before the look ahead, which would move it on
                coming = next(batches, _END)
            if coming is _END:
                # One batch is read ahead, so the end of a pass is known with its last group.
                self.epoch, self.taken, self._here = epoch + 1, 0, self._after_pass()
            else:
                self.taken += size
                self._here = _Entry(state, reason, _mark(coming))
            yield self._group(taken, epoch, last=coming is _END)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.taken, self._here = epoch, 0, _NOWHERE

    def state_dict(self) -> State:
        here = self._here
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "batches": self.taken,
            "world": self.batch.ranks,
            "loader": here.state,
            "reason": here.reason,
            "mark": here.mark,
        }

    def load_state_dict(self, state: State) -> None:
        self.seed, self.epoch, self.taken = int(state["seed"]), int(state["epoch"]), self._taken_by(state)
        self._here = _Entry(state.get("loader"), state.get("reason", ""), state.get("mark"))
        self._restored = True
        then = state.get("world", self.batch.ranks)
        if then != self.batch.ranks:
            self._here = _Entry(None, "its state is that of one process among others", None)
        if then != self.batch.ranks and state["batches"]:
            job_logger.warning(
                f"{type(self.loader).__name__} dealt its batches to {then} processes, and there are {self.batch.ranks} "
                f"now: each continues after its own first {self.taken}. Only the loader knows which samples those are"
            )

    def _taken_by(self, position: State) -> int:
        """Batches that a rank has taken at `position`; under another number of ranks, as many over all of them."""
        return int(position["batches"]) * int(position.get("world", self.batch.ranks)) // self.batch.ranks

    def _group(self, batches: list[Any], epoch: int, last: bool) -> UpdateBatch:
        return UpdateBatch(
            batches=batches,
            ids=[[] for _ in batches],
            dealt_samples=0,
            epoch=epoch,
            last_in_epoch=last,
            position=self.state_dict(),
        )

    def _after_pass(self) -> _Entry:
        """Where the next pass begins: `_begin` resets a loader around a dataset; any other may count passes itself."""
        return _NOWHERE if hasattr(self.loader, "dataset") else _Entry(*self._own_state(), None)

    def _own_state(self) -> tuple[Any, str]:
        """The loader's state, or else None and the reason."""
        if not self._stateful:
            return None, "it has no state_dict and load_state_dict"
        state, refusal = plain_copy(self.loader.state_dict())
        return state, f"its state cannot be saved: {refusal}" if refusal else ""

    def _batches(self, epoch: int) -> Iterator[Any]:
        """Batches of `epoch` from the current position on."""
        skip, restored, self._restored = self.taken, self._restored, False
        if not skip:
            return self._from_beginning(epoch, restored)
        entered = self._entered(epoch, skip)
        if entered is not None:
            return entered
        self._begin(epoch)
        first, again = _peeked(islice(self._numbered(self.loader, epoch, 0), skip, None))
        if first is not _END and self._here.mark not in (None, _mark(first)):
            logger.warning(
                f"after batch {skip}, {type(self.loader).__name__} returns other batches than it did in the run that "
                "is continued: the data has changed, or its order cannot be repeated"
            )
        return again

    def _from_beginning(self, epoch: int, restored: bool) -> Iterator[Any]:
        if restored and self._here.state is not None:
            first, batches = _peeked(self._by_own_state(epoch, 0))
            if first is not _END:  # some loaders take their state at the end of a pass for that end
                return batches
        self._begin(epoch)
        return self._numbered(self.loader, epoch, 0)

    def _entered(self, epoch: int, skip: int) -> Iterator[Any] | None:
        """The batches after the first `skip`, without reading those; None, with a warning, if that is not possible."""
        mark = self._here.mark
        if self._here.state is not None:
            way = self._by_own_state
        elif mark is not None and skips_unread(self.loader):
            way = self._by_sampler
        else:
            self._log_read_again(skip, self._here.reason or "no state of it was saved at this place")
            return None
        try:
            first, batches = _peeked(way(epoch, skip))
        except Exception as error:
            self._log_read_again(skip, f"the attempt failed: {type(error).__name__}: {error}")
            return None
        if first is _END or mark not in (None, _mark(first)):
            self._log_read_again(skip, "another batch follows when it is entered there")
            return None
        return batches

    def _log_read_again(self, skip: int, reason: str) -> None:
        name = type(self.loader).__name__
        logger.warning(f"reading {skip} batches of {name} again, to continue after them: {reason}")

    def _by_own_state(self, epoch: int, skip: int) -> Iterator[Any]:
        self._begin(epoch)
        self.loader.load_state_dict(self._here.state)
        return self._numbered(self.loader, epoch, skip)

    def _by_sampler(self, epoch: int, skip: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._sandbox:  # draw as in a pass from the beginning, in which only the first batch draws
            self._sandbox.seed(derive_seed(STREAM_ORDER, self.seed, epoch))
            iter(self.loader)
            self._sandbox.seed(derive_seed(STREAM_SAMPLE, self.seed, epoch, 0))
            left = list(islice(self.loader.batch_sampler, skip, None))
        return self._numbered(with_batch_sampler(self.loader, left), epoch, skip)

    def _numbered(self, loader: Any, epoch: int, number: int) -> Iterator[Any]:
        """The batches of `loader`, the first under the seed of batch `number`."""
        with self._sandbox:
            self._sandbox.seed(derive_seed(STREAM_ORDER, self.seed, epoch))
            batches = read_batches(loader, self._reader)
        while True:
            if self._dataset_epoch.value != epoch:
                self._dataset_epoch.set(epoch)
            with self._sandbox:
                self._sandbox.seed(derive_seed(STREAM_SAMPLE, self.seed, epoch, number))
                batch = next(batches, _END)
            if batch is _END:
                return
            number += 1
            yield batch

    def _begin(self, epoch: int) -> None:
        for generator, first in self._generators:
            rewind(generator, first, epoch)
        set_epochs(epoch, self.loader, *self._parts)
        self._dataset_epoch.set(epoch)

    def _nothing(self) -> str:
        name = type(self.loader).__name__
        if self.epoch or self.taken:
            return (
                f"the training loader ({name}) gave no batch in epoch {self.epoch} (from batch {self.taken} on). "
                "A generator can be iterated once only: return an object whose __iter__ begins again."
            )
        return (
            f"the training loader ({name}) is empty: its dataset has no sample, or drop_last drops them all."
        )


def _peeked(batches: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    """The first batch, `_END` if there is none, and all of them."""
    first = next(batches, _END)
    return first, batches if first is _END else chain([first], batches)


def _mark(batch: Any) -> int | None:
    """A checksum; None for a batch on an accelerator, which the host must not wait for."""
    return checksum(batch) if all(tensor.device.type == "cpu" for tensor in tensors_in(batch)) else None
