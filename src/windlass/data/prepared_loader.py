"""The loader of a user's own loop: this rank's batches, on the device, and what is known about each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.trees import send_to_device
from windlass.core.types import State
from windlass.data.batch_reader import BatchReader, DealtBatch
from windlass.data.bookmark import Bookmark
from windlass.data.dealt_loader import DealtLoader
from windlass.data.group import Group
from windlass.data.seeding import Sandbox
from windlass.dist.beacon import AFTER, beacon

logger = get_logger(__name__)


class Follower(Protocol):
    """Whoever must know which loader a script is in: the accelerator, which accumulates to the end of a pass."""

    def begin(self, loader: PreparedLoader) -> None: ...

    def end(self, loader: PreparedLoader) -> None: ...


class Nobody:
    """The follower of a loader that nobody follows."""

    def begin(self, loader: PreparedLoader) -> None:
        pass

    def end(self, loader: PreparedLoader) -> None:
        pass


@dataclass(slots=True)
class _Place:
    """Where a loader stands: shared by it and its views that skip batches.

    Attributes:
        epoch: the pass that runs, or the coming one.
        consumed: position in it, in the reader's unit.
        resume: where the coming pass begins, once; 0 after that.
        bookmark: by which a stream can be entered at `consumed`, or where the state that was loaded was taken.
    """

    seed: int
    epoch: int = 0
    consumed: int = 0
    resume: int = 0
    bookmark: Bookmark | None = None


class PreparedLoader(DealtLoader):
    """A `DataLoader` whose batches are dealt to ranks: no sample comes twice, none is lost, and every rank gets the
    same number of batches. Iterated, it gives them to a loop of the user's; a Trainer takes them as groups (`groups`).

    The tail of a pass is shared out evenly. A rank for which no sample is left gets a *filler*: a batch to run along
    with, so that collectives meet, and which must weigh nothing.

    Iterating makes one pass, and the next iteration the next pass. Leaving a pass early begins it anew the next time.

    Attributes:
        dataset, batch_size, sampler, collate_fn, num_workers, pin_memory, drop_last: as for any `DataLoader`;
            `batch_size` is that of one rank, None where it varies.
        iteration: number of the pass that runs, or of the coming one.
        end_of_dataloader: the batch that was handed out last is the last of its pass.
        remainder: samples over all ranks that the last, short batch will hold; 0 where it is whole; -1 where
            that is not known.
        shares: samples of the current batch on each rank, in rank order.
        device: where batches are put; None leaves them where the collator made them.
        follower: is told where passes begin and end.

    Args:
        loader: the user's.
        reader: gives the dealt_batches.
        rank, world: this rank's place among those that have data of their own.
        restores_position: `load_state_dict` goes back into the middle of a pass; otherwise to its start.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: BatchReader,
        *,
        seed: int,
        rank: int,
        world: int,
        device: torch.device | None,
        non_blocking: bool = False,
        restores_position: bool = False,
    ) -> None:
        super().__init__(loader.dataset, **_options(loader, reader, world))
        self.loader, self.device = loader, device
        self.follower: Follower = Nobody()
        self._reader, self._rank, self._world = reader, rank, world
        self._non_blocking, self._restores_position = non_blocking, restores_position
        self._drops_last = _drops_last(loader)
        self._place, self._skip = _Place(seed), 0
        self._enter()

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def iteration(self) -> int:
        return self._place.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a whole batch over all ranks; None where batches differ in size."""
        return self._reader.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset.

        Raises:
            TypeError: a stream, whose length nobody knows.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def samples_here(self) -> int:
        """Samples of this rank in the current batch; 0 in a filler."""
        return self.shares[self._rank]

    @property
    def samples_everywhere(self) -> int:
        """Samples of all ranks in the current batch."""
        return sum(self.shares)

    @property
    def is_filler(self) -> bool:
        """The current batch is none of this rank's, and must weigh nothing."""
        return self.samples_here == 0

    def count(self, epoch: int, start: int = 0) -> int | None:
        count = self._reader.count(epoch, start)
        return None if count is None else max(count - self._skip, 0)

    def __iter__(self) -> Any:
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        place, start = self._place, self._start()
        epoch = place.epoch
        self._enter()
        self.follower.begin(self)
        try:
            for dealt in self._reader.read(epoch, start, place.bookmark):
                self._take(dealt, epoch)
                beacon().call(f"{AFTER}read data")
                yield dealt.batch if self.device is None else self._moved(dealt.batch)
                beacon().call("read data")
            if place.epoch == epoch:  # there was no batch
                place.epoch, place.consumed = epoch + 1, 0
        finally:
            self.follower.end(self)

    def _moved(self, batch: Any) -> Any:
        assert self.device is not None
        return send_to_device(batch, self.device, self._non_blocking)

    def _start(self) -> int:
        start, self._place.resume = self._place.resume, 0
        if self._skip:  # counts from the beginning of the pass, wherever a checkpoint was taken
            start = self._reader.position(self._place.epoch, self._skip)
        self._place.consumed = start
        return start

    def _enter(self) -> None:
        self.end_of_dataloader = False
        self._ids: list[int] = []
        self.shares: tuple[int, ...] = (0,) * self._world
        self.remainder = self._known_remainder()

    def _known_remainder(self) -> int:
        if self._drops_last or not self.total_batch_size or not hasattr(self.dataset, "__len__"):
            return -1
        return self.total_dataset_length % self.total_batch_size

    def _take(self, dealt: DealtBatch, epoch: int) -> None:
        self.shares, self.end_of_dataloader, self._ids = dealt.shares, dealt.last, dealt.ids
        place = self._place
        place.epoch, place.consumed = (epoch + 1, 0) if dealt.last else (epoch, dealt.end)
        place.bookmark = dealt.bookmark
        if dealt.last and not self._drops_last and self.total_batch_size:
            self.remainder = self.samples_everywhere % self.total_batch_size

    # --- for a Trainer ------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset; None for a stream."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def groups(self, accumulation: int) -> Iterator[Group]:
        """The groups from the current position to the end of its pass, in host memory; the next call goes on with the
        next pass. The default generators are as they were after it.

        Raises:
            DataError: there is no batch.
        """
        place, sandbox, held = self._place, Sandbox(), list[DealtBatch]()
        epoch, start = place.epoch, place.consumed
        dealt_batches = self._reader.read(epoch, start, place.bookmark)
        while True:
            with sandbox:
                dealt = next(dealt_batches, None)
            if dealt is None:
                break
            held.append(dealt)
            if len(held) == accumulation or dealt.last:
                self._take(dealt, epoch)
                yield self._group(held, epoch)
                held = []
        if place.epoch == epoch:
            raise DataError(
                f"the prepared loader of {type(self.dataset).__name__} gave no batch (epoch {epoch}, from "
                f"{self._reader.unit} {place.consumed} on): it is empty, drop_last drops all of it, or the data has "
                "become shorter since the checkpoint was written."
            )

    def _group(self, dealt_batches: list[DealtBatch], epoch: int) -> Group:
        own = [dealt for dealt in dealt_batches if dealt.shares[self._rank]]
        return Group(
            batches=[dealt.batch for dealt in own or dealt_batches[:1]],
            ids=[dealt.ids for dealt in own or dealt_batches[:1]],
            samples=sum(sum(dealt.shares) for dealt in dealt_batches),
            epoch=epoch,
            last_in_epoch=dealt_batches[-1].last,
            filler=not own,
            position=self.state_dict(),
        )

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        consumed = self._reader.position(epoch, updates * accumulation)
        return {**self.state_dict(), "epoch": epoch, "consumed": consumed, "bookmark": None}

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        for batch in self:
            yield None if self.is_filler else self._ids, batch

    # --- where it stands ----------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the coming pass; a no-op where it is that already, so that a restored position is kept."""
        if epoch != self._place.epoch:
            self._place.epoch, self._place.consumed, self._place.resume = epoch, 0, 0

    def skipping(self, batches: int) -> PreparedLoader:
        """A view of this loader whose pass begins behind its first `batches`; epochs are counted together."""
        view = copy.copy(self)
        view._skip = self._skip + batches
        view._enter()
        return view

    def state_dict(self) -> State:
        """Where the batch after the one handed out last begins. O(1) in size and time."""
        place = self._place
        return {
            "seed": place.seed,
            "epoch": place.epoch,
            "consumed": place.consumed,
            "unit": self._reader.unit,
            "bookmark": place.bookmark,
        }

    def load_state_dict(self, state: State) -> None:
        """Go back to where `state` was taken: to the position itself, or else to the start of its pass."""
        place = self._place
        if int(state["seed"]) != place.seed:
            place.seed = int(state["seed"])
            self._reader.reseed(place.seed)
        place.epoch, place.bookmark = int(state["epoch"]), state.get("bookmark")
        place.resume = place.consumed = self.position_in(state)
        if place.consumed != state.get("consumed", place.consumed):
            reason = (
                f"positions are counted in {self._reader.unit} here"
                if self._restores_position
                else "set use_stateful_dataloader=True to continue there, or call skip_first_batches"
            )
            logger.warning(
                f"the state was taken {state['consumed']} {state.get('unit', 'samples')} into a pass, and the loader "
                f"begins that pass anew: {reason}"
            )

    def position_in(self, state: State) -> int:
        """Where `state` was taken, in the reader's unit; the start of the pass if it cannot be continued there."""
        if "batches" in state:  # of a Trainer that read the loader batch by batch, as it was
            return self._reader.position(int(state["epoch"]), int(state["batches"]))
        enterable = self._restores_position and self._reader.accepts(state.get("unit", "samples"))
        return int(state["consumed"]) if enterable else 0


def _options(loader: DataLoader[Any], reader: BatchReader, world: int) -> dict[str, Any]:
    """What a `DataLoader` shows of itself, as the user's says it, with the batch size of one rank."""
    total = reader.total_batch_size
    options: dict[str, Any] = {
        "batch_size": None if total is None else max(total // world, 1),
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last and total is not None,
        "generator": loader.generator,
        "worker_init_fn": loader.worker_init_fn,
    }
    if not isinstance(loader.dataset, IterableDataset):
        options |= _samplers(loader)
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["timeout"] = loader.timeout
    return options


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """A batch sampler of the user's own leaves a `DataLoader` no batch size to show."""
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        return {"sampler": loader.sampler}
    return {"batch_sampler": loader.batch_sampler, "batch_size": 1, "drop_last": False}


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
