"""The loader of a dataset that can only be iterated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.types import Collator, State
from windlass.data.agreed_stream import AgreedStream
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.bookmark import belongs
from windlass.data.dispatch import Dispatched
from windlass.data.loader import Loader
from windlass.data.lockstep_reader import LockstepReader
from windlass.data.order import known_length
from windlass.data.same_stream import splits_itself
from windlass.data.script_pass import ForScripts
from windlass.data.stream import RowCutter, SharedStream
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang

logger, job_logger = get_logger(__name__), get_job_logger(__name__)


class StreamLoader(Loader):
    """Reads a stream from any position, by its own state if that leads back to the same samples, else from its start.

    A stream that splits itself by rank (`agree` detects it) is not dealt again: every rank reads its own part, and
    positions count that part's samples. `len(dataset)`, if there is one, is then the length of the part. If the plan
    dispatches, the main process alone reads, and the ranks get its batches in turn.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchPlan,
        plan: DataPlan,
        collate: Collator,
        *,
        for_scripts: ForScripts | None = None,
    ) -> None:
        super().__init__(dataset, batch, plan, collate, for_scripts=for_scripts)
        self._data_ranks, self._sizes = Gang(), [known_length(dataset)]
        self._stream = self._opened(batch.ranks > 1 and splits_itself(dataset))
        self._dispatched: Dispatched | None = None  # once the ranks have met

    def agree(self, data_ranks: Gang, position: State | None = None) -> None:
        """Find out if the ranks read the same stream, or a part each. Collective; done once.

        Args:
            position: where a resumed run continues; it shows how the samples before it were dealt. None: at the
                beginning. The pass whose first samples are compared here is the one that is read next.

        Raises:
            DataError: on all ranks: they read different samples that cannot be read again.
            ConfigError: the main process is to read a stream for all that was split by node.
        """
        if data_ranks.size == 1 or self._data_ranks.size > 1:
            return
        self._data_ranks = data_ranks
        if self.plan.dispatch:
            self._dispatched = self._new_dispatched()
            return
        self._stream = self._opened(self.own_parts or bool(position and position.get("parts", 1) > 1))
        # A resumed pass is compared by its first `read`, when its position has been loaded.
        if not position:
            place = self._place
            self._stream.agree(PassRequest(place.epoch, place.consumed, place.bookmark, self.passes_alike))
        self._gather_sizes()

    def _opened(self, own_parts: bool) -> AgreedStream:
        batch = self.batch
        stream = AgreedStream(
            self._shared(batch.ranks, batch.rank),
            # One rank's part of an evaluation set may be empty.
            self._shared(1, 0, may_be_empty=self.passes_alike),
            self._data_ranks,
            lockstep=False,
            may_be_empty=self.passes_alike,
        )
        if own_parts:
            stream.take_own_parts()
        # The plan's seed, with which cutters begin, is not that of a loaded position.
        stream.reseed(self.seed)
        return stream

    def _new_dispatched(self) -> Dispatched:
        if splits_itself(self.dataset):
            fix = "the dataset was split by node, so the main process has only a part of it; pass the whole dataset"
            raise ConfigError(Problem("accelerator_config.dispatch_batches", True, fix))
        alone = self._shared(1, 0, may_be_empty=self.passes_alike)
        alone.reseed(self.seed)
        return Dispatched(
            alone, self._data_ranks, split=False, drop_last=self.drop_last, stream=self._shared(1, 0)
        )

    def _shared(self, ranks: int, rank: int, may_be_empty: bool = False) -> SharedStream:
        row = self.batch.micro * ranks
        cutter = RowCutter(self.dataset, self.collate_fn, self.plan, row, ranks, rank)
        return SharedStream(cutter, self.plan, may_be_empty=may_be_empty)

    @property
    def own_parts(self) -> bool:
        return self._stream.own_parts

    @property
    def total_batch_size(self) -> int:
        """Samples by which a micro-batch moves the position: those of all ranks, or of this rank's own part."""
        return self.batch.micro if self.own_parts else super().total_batch_size

    @property
    def num_samples(self) -> int | None:
        if not self.own_parts:
            return super().num_samples
        sizes = [size for size in self._sizes if size is not None]
        return sum(sizes) if len(sizes) == self.batch.ranks else None

    def resize(self, micro: int, accumulation: int) -> None:
        super().resize(micro, accumulation)
        agreed = self._stream.agreed
        self._stream = self._opened(self.own_parts)
        # The ranks have compared their samples already, and must not do so in the middle of a pass.
        self._stream.agreed = agreed
        if self._dispatched is not None:
            self._dispatched = self._new_dispatched()

    def position_in(self, state: State) -> int:
        # As many samples over all parts as when it was saved, divided among those of today.
        now = int(self._parts().get("parts", 1))
        return int(state["consumed"]) * int(state.get("parts", 1)) // now

    def _compare(self, state: State) -> None:
        super()._compare(state)
        place, parts, now = self._place, int(state.get("parts", 1)), self._parts().get("parts", 1)
        if parts != now:
            place.bookmark = None  # of another part
            job_logger.warning(
                f"{type(self.dataset).__name__} was split into {parts} parts by itself, and is read in {now} now: each "
                f"continues after its own first {place.consumed} samples. Only the stream knows which samples those are"
            )

    def _group(self, rows: list[DealtBatch], epoch: int, of_pass: State) -> UpdateBatch:
        group = super()._group(rows, epoch, of_pass)
        group.dealt_samples = 0 if self.own_parts else group.dealt_samples
        return group

    def _of_pass(self, epoch: int) -> State:
        return super()._of_pass(epoch) | self._parts()

    def _position(self, of_pass: State) -> State:
        place = self._place
        bookmark = place.bookmark if belongs(place.bookmark, place.epoch, place.consumed) else None
        return super()._position(of_pass) | {"bookmark": bookmark}

    def _parts(self) -> State:
        return {"parts": self.batch.ranks} if self.own_parts else {}

    @property
    def must_go_in_step(self) -> bool:
        return self._dispatched is not None

    def _reader(self, update: int) -> BatchReader:
        return self._dispatched or self._stream

    def _read(self, epoch: int, start: int, update: int, private: bool) -> Iterator[DealtBatch]:
        rows = super()._read(epoch, start, update, private)
        self._gather_sizes()
        return self._checked(rows) if self.own_parts and not start else rows

    def _script_pass(self, data_ranks: Gang) -> Iterator[DealtBatch]:
        self.agree(data_ranks)
        if not self.own_parts:
            return self._plain_pass()
        epoch = 0 if self.passes_alike else self.epoch
        return LockstepReader(self._stream, data_ranks, own_parts=True).read(PassRequest(epoch, private=True))

    def _checked(self, rows: Iterator[DealtBatch]) -> Iterator[DealtBatch]:
        size = known_length(self.dataset)
        for row in rows:
            if row.last and size is not None and row.end < size:
                logger.warning(
                    f"{type(self.dataset).__name__} splits itself by rank: this rank read {row.end} samples, and its "
                    f"__len__ returns {size}. Let __len__ count this rank's samples only: the run's length follows "
                    "from it"
                )
            yield row

    def _gather_sizes(self) -> None:
        """The length of each rank's part. Collective if the ranks have agreed on parts since the last call."""
        if self.own_parts and len(self._sizes) < self._data_ranks.size:
            self._sizes = self._data_ranks.gather_objects(known_length(self.dataset))

    def _size(self, epoch: int) -> int | None:
        sizes = [size for size in self._sizes if size is not None]
        return max(sizes) if len(sizes) == len(self._sizes) else None

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self._stream.reseed(seed)
        if self._dispatched is not None:
            self._dispatched.reseed(seed)
