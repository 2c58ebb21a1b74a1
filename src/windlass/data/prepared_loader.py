"""The loader of a user's own loop: this rank's batches, on the device, and their shares of all ranks' samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from windlass.core.logs import get_logger
from windlass.core.trees import send_to_device
from windlass.core.types import State
from windlass.data.agreed_stream import AgreedStream
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.dealt_loader import DealtLoader
from windlass.data.order import known_length, ordering_parts
from windlass.data.script_pass import Follower
from windlass.data.seeding import Sandbox, set_epochs
from windlass.data.shown_rows import rows_to_keep
from windlass.dist.beacon import marked_reads

logger = get_logger(__name__)


class PreparedLoader(DealtLoader):
    """A `DataLoader` whose batches are dealt to ranks: no sample comes twice, none is lost, and every rank gets the
    same number of batches. A user's loop iterates it; a Trainer takes groups.

    The tail of a pass is divided evenly. A rank for which no sample is left gets a *filler*: a batch with zero weight
    that keeps collectives in step.

    Iterating makes one pass, and the next iteration the next pass. A pass left early begins again the next time.

    Attributes:
        dataset, batch_size, sampler, collate_fn, num_workers, pin_memory, drop_last: as for any `DataLoader`;
            `batch_size` is that of one rank, None if it varies.
        iteration: number of the current pass, or of the next one.
        end_of_dataloader: the current batch is the last of its pass.
        remainder: samples over all ranks that the last, short batch holds; 0 if it is whole; -1 if
            unknown.
        shares: samples of the current batch on each rank, in rank order.
        device: of the returned batches; None leaves them unchanged.
        follower: is called when a pass begins, goes on and ends, if there is one.

    Args:
        loader: the user's.
        reader: of the batches.
        rank, ranks: this rank's place among those that have data of their own.
        restores_position: `load_state_dict` restores the position within a pass; otherwise its start.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: BatchReader,
        *,
        seed: int,
        rank: int,
        ranks: int,
        device: torch.device | None,
        non_blocking: bool = False,
        restores_position: bool = False,
    ) -> None:
        super().__init__(loader.dataset, seed, **_options(loader, reader, ranks))
        self.loader, self.device = loader, device
        self.follower: Follower | None = None
        self._reader, self._rank, self._ranks = reader, rank, ranks
        self._non_blocking, self._restores_position = non_blocking, restores_position
        self._drops_last = _drops_last(loader)
        self._shown = rows_to_keep(loader.dataset)
        self._skip = 0
        self._enter()

    _is_accelerate_prepared = True  # scripts look for it

    @property
    def must_go_in_step(self) -> bool:
        return True

    @property
    def iteration(self) -> int:
        """The epoch of the next pass, from 0."""
        return self._place.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a whole batch over all ranks; None if batches differ in size."""
        return self._reader.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset. Raises TypeError for a stream of unknown length."""
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
        """The current batch has no sample of this rank, and must have zero weight."""
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
        if self.follower is not None:
            self.follower.begin(self)
        # A loop that is left early closes this generator: the follower must not keep the loader as the active one.
        try:
            for dealt in marked_reads(self._read(epoch, start)):
                self._move_after(dealt, epoch)
                batch = dealt.batch
                if self.follower is not None:
                    self.follower.turn_to(self)
                yield batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
            if place.epoch == epoch:  # there was no batch
                place.epoch, place.consumed = epoch + 1, 0
        finally:
            if self.follower is not None:
                self.follower.end(self)

    def _read(self, epoch: int, start: int, update: int = 0) -> Iterator[DealtBatch]:
        place = self._place
        private = place.running > 0  # one pass at a time may use the lasting workers
        place.running += 1
        try:
            yield from self._reader.read(PassRequest(epoch, start, place.bookmark, private, update))
        finally:
            place.running -= 1

    def _start(self) -> int:
        start, self._place.resume = self._place.resume, 0
        if self._skip:  # counts from the beginning of the pass, not from a checkpoint's position
            start = self._reader.position(self._place.epoch, self._skip)
        self._place.consumed = start
        return start

    def _enter(self) -> None:
        self.end_of_dataloader = False
        self._ids: list[int] = []
        self.shares: tuple[int, ...] = (0,) * self._ranks
        self.remainder = self._known_remainder()

    def _known_remainder(self) -> int:
        samples = known_length(self.dataset)
        if self._drops_last or not self.total_batch_size or samples is None:
            return -1
        return samples % self.total_batch_size

    def _move_after(self, row: DealtBatch, epoch: int) -> None:
        super()._move_after(row, epoch)
        self.shares, self.end_of_dataloader, self._ids = row.shares, row.last, row.ids
        if row.last and not self._drops_last and self.total_batch_size:
            self.remainder = self.samples_everywhere % self.total_batch_size

    # --- for a Trainer ------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int | None:
        return known_length(self.dataset)

    def _training_pass(self, epoch: int, start: int, accumulation: int) -> Iterator[DealtBatch]:
        """The default generators are unchanged after each batch, whatever the reader and the user's code draw."""
        sandbox, batches = Sandbox(), self._read(epoch, start, accumulation)
        while True:
            with sandbox:
                row = next(batches, None)
            if row is None:
                return
            yield row

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        consumed = self._reader.position(epoch, updates * accumulation)
        return {**self.state_dict(), "epoch": epoch, "consumed": consumed, "bookmark": None}

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        for batch in self:
            yield None if self.is_filler else self._ids, batch

    # --- the position ----------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next pass, also of the user's sampler. A restored position in that pass is kept."""
        if epoch != self._place.epoch:
            self._place.epoch, self._place.consumed, self._place.resume = epoch, 0, 0
        set_epochs(epoch, *ordering_parts(self.loader))

    @property
    def skipped(self) -> int:
        """Batches that are left out at the start of each pass."""
        return self._skip

    def skipping(self, batches: int) -> PreparedLoader:
        """A view of this loader whose pass begins after its first `batches`; both count the same epochs."""
        # A shallow copy: `_place` is one object for both.
        view = copy.copy(self)
        view._skip = self._skip + batches
        view._enter()
        return view

    def state_dict(self) -> State:
        """The position after the current batch. O(1) in size and time."""
        return self._position(self._of_pass(self.epoch))

    def _of_pass(self, epoch: int) -> State:
        return super()._of_pass(epoch) | {"seed": self._place.seed, "unit": self._reader.unit}

    def _position(self, of_pass: State) -> State:
        return {**super()._position(of_pass), "bookmark": self._place.bookmark}

    def _reseed(self, seed: int) -> None:
        self._reader.reseed(seed)

    def _compare(self, state: State) -> None:
        consumed = self._place.consumed
        if consumed != state.get("consumed", consumed):
            reason = (
                f"positions are counted in {self._reader.unit} here"
                if self._restores_position
                else "set use_stateful_dataloader=True to continue there, or call skip_first_batches"
            )
            logger.warning(
                f"the state was taken {state['consumed']} {state.get('unit', 'samples')} into a pass, and the loader "
                f"restarts that pass: {reason}"
            )

    def position_in(self, state: State) -> int:
        """The position of `state` in the reader's unit; the start of the pass if it cannot be continued there."""
        if "batches" in state:  # of a Trainer that read the loader unprepared
            return self._reader.position(int(state["epoch"]), int(state["batches"]))
        if not self._restores_position:
            return 0
        unit = state.get("unit", "samples")
        if isinstance(self._reader, AgreedStream):
            self._reader.continue_from(unit)
        return int(state["consumed"]) if unit == self._reader.unit else 0


def _options(loader: DataLoader[Any], reader: BatchReader, ranks: int) -> dict[str, Any]:
    """Public attributes of a `DataLoader`, as in the user's, with the batch size of one rank."""
    total = reader.total_batch_size
    options: dict[str, Any] = {
        "batch_size": None if total is None else max(total // ranks, 1),
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        # PyTorch refuses the two together.
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
    """With a batch sampler of the user's own, a `DataLoader` has no batch size."""
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        return {"sampler": loader.sampler}
    return {"batch_sampler": loader.batch_sampler, "batch_size": 1, "drop_last": False}


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
