"""Groups from a loader that a user made: its batches are taken as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.plan import BatchPlan
from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_ORDER, STREAM_SAMPLE, derive_seed
from windlass.core.types import State
from windlass.data.group import Group
from windlass.data.seeding import Sandbox, first_seed, rewind

logger = get_logger(__name__)
_END = object()


class ForeignLoader:
    """The engine's view of any iterable of batches: a `DataLoader`, a `StatefulDataLoader`, a list, a class.

    Each rank iterates its own loader, so ranks may have different numbers of batches, and which samples they
    hold is unknown. What the loader draws from the default generators (a `RandomSampler` does) is seeded by
    (seed, epoch, batch number), so that the same batches come again on resume. The position is the loader's
    own state where it has `state_dict`, else the number of batches taken, which a resumed run reads again and
    throws away.

    Args:
        loader: yields batches; must begin anew each time it is iterated.
        batch: `batch.accumulation` is the default of `groups`.
        seed: the run's data seed.
        longest: batches of the rank that has most; None: of this one.
    """

    def __init__(self, loader: Any, batch: BatchPlan, seed: int = 42, longest: int | None = None) -> None:
        if not hasattr(loader, "__iter__"):
            raise DataError(
                f"the training loader ({type(loader).__name__}) cannot be iterated; return a DataLoader."
            )
        self.loader, self.batch, self.seed, self._longest = loader, batch, seed, longest
        self.epoch, self.taken = 0, 0
        self._restored: Any = None
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._sandbox = Sandbox()
        self._generators = [(g, first_seed(g)) for g in (_generator(loader), _generator(_sampler(loader)))]

    @property
    def dataset(self) -> Any:
        """The loader's dataset, None where it has none."""
        return getattr(self.loader, "dataset", None)

    @property
    def num_samples(self) -> int | None:
        """Unknown: how a foreign loader shards, drops or repeats is its own business."""
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches of an epoch on this rank; TypeError where the loader has no length."""
        return len(self.loader)

    def groups_per_epoch(self, accumulation: int | None = None) -> int | None:
        """Updates of an epoch, None where the loader has no length."""
        count = self._longest or loader_length(self.loader)
        if count is None:
            return None
        return -(-count // (accumulation or self.batch.accumulation))

    def groups_left(self, position: State, accumulation: int) -> int | None:
        """Updates from `position` (a `state_dict`) to the end of its epoch, on this rank."""
        whole = self.groups_per_epoch(1)
        return None if whole is None else max(-(-(whole - int(position["batches"])) // accumulation), 0)

    def groups(self, accumulation: int | None = None) -> Iterator[Group]:
        """Groups from the current position to the end of its epoch; the next call goes on with the next epoch."""
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
                    state = self._own_state()  # before the look ahead, which would move it on
                coming = next(batches, _END)
            if coming is _END:
                self.epoch, self.taken, state = epoch + 1, 0, None
            else:
                self.taken += size
            self._restored = state
            yield self._group(taken, epoch, last=coming is _END)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; a no-op where it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.taken, self._restored = epoch, 0, None

    def state_dict(self) -> State:
        """Where the group after the last one taken begins."""
        return {"seed": self.seed, "epoch": self.epoch, "batches": self.taken, "loader": self._restored}

    def load_state_dict(self, state: State) -> None:
        self.seed, self.epoch, self.taken = int(state["seed"]), int(state["epoch"]), int(state["batches"])
        self._restored = state.get("loader")

    def _group(self, batches: list[Any], epoch: int, last: bool) -> Group:
        return Group(
            batches=batches,
            ids=[[] for _ in batches],
            samples=0,
            epoch=epoch,
            last_in_epoch=last,
            position=self.state_dict(),
        )

    def _own_state(self) -> Any:
        return self.loader.state_dict() if self._stateful else None

    def _batches(self, epoch: int) -> Iterator[Any]:
        """Batches of `epoch` from the current position on."""
        skip = self.taken
        if skip and self._stateful and self._restored is not None:
            self.loader.load_state_dict(self._restored)
        else:
            self._begin(epoch)
            if skip:
                logger.warning(
                    f"reading {skip} batches of {type(self.loader).__name__} again, to continue behind them"
                )
        number = skip if self._restored is not None else 0
        with self._sandbox:
            self._sandbox.seed(derive_seed(STREAM_ORDER, self.seed, epoch))
            batches = iter(self.loader)
        while True:
            with self._sandbox:
                self._sandbox.seed(derive_seed(STREAM_SAMPLE, self.seed, epoch, number))
                batch = next(batches, _END)
            if batch is _END:
                return
            number += 1
            if number > skip:
                yield batch

    def _begin(self, epoch: int) -> None:
        for generator, first in self._generators:
            rewind(generator, first, epoch)
        for part in (self.loader, _sampler(self.loader), self.dataset):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def _nothing(self) -> str:
        name = type(self.loader).__name__
        if self.epoch or self.taken:
            return (
                f"the training loader ({name}) gave no batch in epoch {self.epoch} (from batch {self.taken} on). "
                "A generator can be iterated once only: return an object whose __iter__ begins anew."
            )
        return (
            f"the training loader ({name}) is empty: its dataset has no sample, or drop_last drops them all."
        )


def loader_length(loader: Any) -> int | None:
    """Batches of a pass over any loader, None where it does not say."""
    try:
        return len(loader)
    except TypeError:
        return None


def _sampler(loader: Any) -> Any:
    return getattr(loader, "sampler", None)


def _generator(part: Any) -> Any:
    return getattr(part, "generator", None)
