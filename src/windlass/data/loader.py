"""The Trainer's loaders for training and evaluation: this rank's micro-batches, resumable at every update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.device import has_accelerator
from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.core.types import Collator, State
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.dealt_loader import DealtLoader
from windlass.data.dealt_rows import BalancedRows, SampleRows
from windlass.data.fetch import Fetch
from windlass.data.map_reader import MapReader
from windlass.data.order import Order, RebalancedOrder
from windlass.data.script_pass import ForScripts, ScriptPass
from windlass.data.shown_rows import rows_to_keep
from windlass.data.source import Source
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang

logger = get_job_logger(__name__)


class Loader(DealtLoader):
    """A PyTorch `DataLoader` for user code, and a source of `UpdateBatch`es for the engine.

    Its whole state is (seed, epoch, samples consumed over all ranks). Only `groups` moves it. Plain iteration is a
    full pass of this rank's micro-batches, in the order of the current epoch, then of the following ones.

    Subclasses give the reader of a pass, and the number of samples.

    Args:
        for_scripts: what plain iteration adds for the loop of a script. The engine does not iterate plainly.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchPlan,
        plan: DataPlan,
        collate: Collator,
        sampler: Any = None,
        *,
        for_scripts: ForScripts | None = None,
    ) -> None:
        workers = {"prefetch_factor": plan.prefetch_factor, "persistent_workers": plan.persistent_workers}
        super().__init__(
            dataset,
            plan.seed,
            batch_size=batch.micro,
            sampler=sampler,
            num_workers=plan.workers,
            collate_fn=collate,
            pin_memory=plan.pin_memory and has_accelerator(),
            drop_last=plan.drop_last,
            # PyTorch refuses these options without workers.
            **(workers if plan.workers else {}),
        )
        self.batch, self.plan = batch, plan
        self._passes = 0
        self._for_scripts = for_scripts

    @property
    def passes_alike(self) -> bool:
        """True if every plain pass is that of epoch 0, as an evaluation needs."""
        return self.plan.purpose == "evaluation"

    @property
    def seed(self) -> int:
        return self._place.seed

    @property
    def consumed(self) -> int:
        """Samples of the current epoch before the position."""
        return self._place.consumed

    @property
    def total_batch_size(self) -> int:
        """Samples that one micro-batch of every rank holds together."""
        return self.batch.micro * self.batch.ranks

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None for a stream of unknown length."""
        return self._length(self.epoch)

    def count(self, epoch: int, start: int = 0) -> int | None:
        length = self._length(epoch)
        return None if length is None else max(-(-(length - start) // self.total_batch_size), 0)

    def position_in(self, state: State) -> int:
        return int(state["consumed"])

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        consumed = updates * self.total_batch_size * accumulation
        return {"seed": self.seed, "epoch": epoch, "consumed": consumed, "length": self._length(epoch)}

    def groups(self, accumulation: int | None = None) -> Iterator[UpdateBatch]:
        """As `DealtLoader.groups`, with the accumulation of `batch` by default.

        NumPy's and PyTorch's generators are left unchanged; two numbers are drawn from Python's for each micro-batch,
        in a resumed pass as in one that was never interrupted.
        """
        place, length = self._place, self._length(self.epoch)
        # A position that was counted in updates, or of a longer dataset, may be at the end of its pass or behind it. An
        # empty stream stays in its epoch, so that the error is that of an empty stream.
        if length and place.consumed >= length:
            place.epoch, place.consumed = place.epoch + 1, 0
        return super().groups(accumulation or self.batch.accumulation)

    def _training_pass(self, epoch: int, start: int, accumulation: int) -> Iterator[DealtBatch]:
        return self._read(epoch, start, accumulation, private=False)

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        for row in self._plain_pass():
            yield None if row.filler else row.ids, row.batch

    def _plain_pass(self) -> Iterator[DealtBatch]:
        epoch = 0 if self.passes_alike else self.epoch + self._passes
        yield from self._read(epoch, 0, self.batch.accumulation, private=True)
        self._passes += 1

    def __iter__(self) -> Any:
        if self._for_scripts is None:
            return (batch for _, batch in self.batches_with_ids())
        batch = self.batch
        watched = ScriptPass(batch.micro, batch.micro * batch.ranks, self.num_samples, batch.rank)
        return self._for_scripts.batches(self._script_pass(self._for_scripts.data_ranks), watched)

    def _script_pass(self, data_ranks: Gang) -> Iterator[DealtBatch]:
        """A plain pass of equally many batches on every rank."""
        return self._plain_pass()

    def resize(self, micro: int, accumulation: int) -> None:
        """Cut into micro-batches of `micro` samples from the next group on; the order of samples does not change.

        Not for use with `drop_last`, which would drop other samples.
        """
        self.batch = replace(self.batch, micro=micro, accumulation=accumulation)

    def set_epoch(self, epoch: int) -> None:
        self._passes = 0
        if epoch != self.epoch:
            self._place.epoch, self._place.consumed = epoch, 0

    def state_dict(self) -> State:
        return self._position(self._of_pass(self.epoch))

    def _of_pass(self, epoch: int) -> State:
        # The length is that of `epoch`: to know the next epoch's, a sampler of the user would have to run.
        entries = {"seed": self.seed, "length": self._length(epoch)}
        # Another size of batches drops another number of samples, of the same dataset.
        return super()._of_pass(epoch) | entries | ({"size": self._size(epoch)} if self.drop_last else {})

    def load_state_dict(self, state: State) -> None:
        self._passes = 0
        super().load_state_dict(state)

    def _compare(self, state: State) -> None:
        now = self._size(self.epoch)
        then = state.get("size", state.get("length", now))
        # Earlier checkpoints have no size.
        if then == now or ("size" not in state and then == self._length(self.epoch)):
            return
        if None not in (then, now):
            logger.warning(
                f"the dataset has {now} samples, and had {then} when the checkpoint was written: this epoch's "
                "order differs, so some samples of it may come twice or not at all"
            )
        elif state["consumed"]:
            was, became = ("rows with numbers", "a stream") if then else ("a stream", "rows with numbers")
            logger.warning(
                f"the dataset is {became}, and was {was} when the checkpoint was written: their orders differ, so "
                "some samples of this epoch may come twice or not at all"
            )

    def _read(self, epoch: int, start: int, update: int, private: bool) -> Iterator[DealtBatch]:
        """The rows of a pass, of which `update` make an update."""
        return self._reader(update).read(PassRequest(epoch, start, self._place.bookmark, private, update))

    def _reader(self, update: int) -> BatchReader:
        raise NotImplementedError

    def _length(self, epoch: int) -> int | None:
        """Samples of a pass; of several parts, those of the longest."""
        size = self._size(epoch)
        return size if size is None or not self.drop_last else size - size % self.total_batch_size

    def _size(self, epoch: int) -> int | None:
        """As `_length`, with the samples that `drop_last` drops."""
        raise NotImplementedError

    def _reseed(self, seed: int) -> None:
        logger.warning(f"the data order continues with the checkpoint's seed {seed}, not with {self.seed}")


class MapLoader(Loader):
    """Reads a dataset that has `__getitem__`: any position is reached at once.

    Args:
        order: in which order an epoch's samples come.

    Raises:
        DataError: there is nothing to read.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        batch: BatchPlan,
        plan: DataPlan,
        collate: Collator,
        *,
        for_scripts: ForScripts | None = None,
    ) -> None:
        super().__init__(dataset, batch, plan, collate, order, for_scripts=for_scripts)
        self._order = order
        self._source = Source(Fetch(dataset, collate, plan.seed), plan)
        # An evaluation of nothing is reported when it runs.
        if not self.passes_alike:
            if not self._length(0):
                raise DataError(self._nothing())
            self._shown = rows_to_keep(dataset)

    def _nothing(self) -> str:
        count = len(self._order.of(0))
        if not count:
            return (
                f"the dataset ({type(self.dataset).__name__}) is empty: there is no sample to read. "
                "Check the file, the split and any filter that made it."
            )
        row, ranks = self.total_batch_size, self.batch.ranks
        fits = f"a batch size of at most {count // ranks}" if count >= ranks else f"at most {count} processes"
        return (
            f"the dataset has {count} samples, and dataloader_drop_last=True drops an incomplete batch of "
            f"{row} (batch size {self.batch.micro} x {ranks} processes), so nothing is left. "
            f"Use dataloader_drop_last=False or {fits}."
        )

    def _rows(self, update: int) -> SampleRows:
        order, size, ranks, drop_last = self._order, self.total_batch_size, self.batch.ranks, self.drop_last
        if isinstance(order, RebalancedOrder):
            return BalancedRows(order, size, ranks, drop_last, update)
        return SampleRows(order, size, ranks, drop_last)

    def _reader(self, update: int) -> MapReader:
        return MapReader(self._rows(update), self._source, self.batch.rank)

    def _read(self, epoch: int, start: int, update: int, private: bool) -> Iterator[DealtBatch]:
        if not private:
            self._order.set_epoch(epoch)
        return super()._read(epoch, start, update, private)

    def _of_pass(self, epoch: int) -> State:
        stretch = self._order.stretch
        return super()._of_pass(epoch) | ({"stretch": stretch} if stretch else {})

    def load_state_dict(self, state: State) -> None:
        # It follows from the size of an update. In the order for another size a part of the epoch would come twice, and
        # another part not at all.
        if self._order.stretch:
            self._order.stretch = int(state.get("stretch", self._order.stretch))
        super().load_state_dict(state)

    def _size(self, epoch: int) -> int:
        return len(self._order.of(epoch))

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self._order.seed = seed
        self._source.reseed(seed)
