"""The loader that training and evaluation read: micro-batches of this rank, whole updates at a time, exactly
resumable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.types import Collator, State
from windlass.data.dealt_loader import DealtLoader
from windlass.data.dealt_rows import BalancedRows, SampleRows, cuts
from windlass.data.fetch import Fetch
from windlass.data.group import Group
from windlass.data.order import Order, RebalancedOrder
from windlass.data.source import Source

logger = get_logger(__name__)


class Loader(DealtLoader):
    """A PyTorch `DataLoader` to user code, and a source of `Group`s to the engine.

    Its whole state is (seed, epoch, samples consumed over all ranks). `groups` moves it; plain iteration
    never does: it is a full pass of this rank's micro-batches, in the order of the current epoch (and of the
    following ones, pass after pass).

    Attributes:
        passes_alike: every plain pass is that of epoch 0, as an evaluation wants.

    Subclasses give the groups of a (part of an) epoch through `_groups`, and the number of samples through `_length`.
    """

    def __init__(
        self, dataset: Any, batch: BatchPlan, plan: DataPlan, collate: Collator, sampler: Any = None
    ) -> None:
        workers = {"prefetch_factor": plan.prefetch_factor, "persistent_workers": plan.persistent_workers}
        super().__init__(
            dataset,
            batch_size=batch.micro,
            sampler=sampler,
            num_workers=plan.workers,
            collate_fn=collate,
            pin_memory=plan.pin_memory and torch.accelerator.is_available(),
            drop_last=plan.drop_last,
            **(workers if plan.workers else {}),  # type: ignore[arg-type]
        )
        self.batch, self.plan = batch, plan
        self.seed, self._epoch, self.consumed = plan.seed, 0, 0
        self._passes = 0
        self.passes_alike = False

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def total_batch_size(self) -> int:
        """Samples that one micro-batch of every rank holds together."""
        return self.batch.micro * self.batch.world

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None where only reading the stream to its end would tell."""
        return self._length(self.epoch)

    def count(self, epoch: int, start: int = 0) -> int | None:
        length = self._length(epoch)
        return None if length is None else max(-(-(length - start) // self.total_batch_size), 0)

    def position_in(self, state: State) -> int:
        return int(state["consumed"])

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        consumed = updates * self.total_batch_size * accumulation
        return {"seed": self.seed, "epoch": epoch, "consumed": consumed, "length": self._length(epoch)}

    def groups(self, accumulation: int | None = None) -> Iterator[Group]:
        """The groups from the current position to the end of its epoch; the next call goes on with the next epoch.

        A group holds `accumulation` micro-batches of this rank, in host memory. All ranks get the same number
        of groups. NumPy's and PyTorch's generators are left alone; two draws are taken from Python's for each
        micro-batch, in a resumed pass as in one that was never interrupted.
        """
        length = self._length(self.epoch)
        if length is not None and self.consumed >= length:
            self._epoch, self.consumed = self.epoch + 1, 0
        for group in self._groups(
            self.epoch, self.consumed, accumulation or self.batch.accumulation, private=False
        ):
            self._moved_to(group.position)
            yield group

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        epoch = 0 if self.passes_alike else self.epoch + self._passes
        for group in self._groups(epoch, 0, self._plain_accumulation(), private=True):
            ids: list[list[int] | None] = [None] if group.filler else [*group.ids]
            yield from zip(ids, group.batches, strict=True)
        self._passes += 1

    def __iter__(self) -> Any:
        return (batch for _, batch in self.batches_with_ids())

    def resize(self, micro: int, accumulation: int) -> None:
        """Cut into micro-batches of `micro` samples from the next group on: the order of samples does not change.

        Not under `drop_last`, which would drop other samples.
        """
        self.batch = replace(self.batch, micro=micro, accumulation=accumulation)

    def set_epoch(self, epoch: int) -> None:
        self._passes = 0
        if epoch != self.epoch:
            self._epoch, self.consumed = epoch, 0

    def state_dict(self) -> State:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "length": self._length(self.epoch),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken, under its seed, in any world and with any batch size."""
        self._passes = 0
        self._epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        if int(state["seed"]) != self.seed:
            logger.warning(
                f"the data order continues under the checkpoint's seed {state['seed']}, not under {self.seed}"
            )
            self.seed = int(state["seed"])
            self._reseed(self.seed)
        then, now = state.get("length"), self._length(self.epoch)
        if None not in (then, now) and then != now:
            logger.warning(
                f"the dataset has {now} samples, and had {then} when the checkpoint was written: this epoch's "
                "order is another, so some samples of it may come twice or not at all"
            )

    def _moved_to(self, position: State) -> None:
        self._epoch, self.consumed = position["epoch"], position["consumed"]

    def _position(self, epoch: int, consumed: int, last: bool, length: int | None) -> State:
        if last:
            epoch, consumed = epoch + 1, 0
        return {"seed": self.seed, "epoch": epoch, "consumed": consumed, "length": length}

    def _plain_accumulation(self) -> int:
        return 1

    def _length(self, epoch: int) -> int | None:
        raise NotImplementedError

    def _groups(self, epoch: int, start: int, accumulation: int, private: bool) -> Iterator[Group]:
        raise NotImplementedError

    def _reseed(self, seed: int) -> None:
        raise NotImplementedError


class MapLoader(Loader):
    """Reads a dataset that has `__getitem__`: any position is reached at once.

    Args:
        order: in which order an epoch's samples come.

    Raises:
        DataError: there is nothing to read.
    """

    def __init__(
        self, dataset: Any, order: Order, batch: BatchPlan, plan: DataPlan, collate: Collator
    ) -> None:
        super().__init__(dataset, batch, plan, collate, sampler=order)
        self._order = order
        self._source = Source(Fetch(dataset, collate, plan.seed), plan)
        if not self._length(0):
            raise DataError(self._nothing())

    def _nothing(self) -> str:
        count = len(self._order.of(0))
        if not count:
            return (
                f"the dataset ({type(self.dataset).__name__}) is empty: there is no sample to read. "
                "Check the file, the split and any filter that made it."
            )
        row = self.total_batch_size
        return (
            f"the dataset has {count} samples, and dataloader_drop_last=True drops an incomplete batch of "
            f"{row} (batch size {self.batch.micro} x {self.batch.world} processes), so nothing is left. "
            f"Use dataloader_drop_last=False or a batch size of at most {max(1, count // self.batch.world)}."
        )

    def _rows(self, accumulation: int) -> SampleRows:
        order, size, world, drop_last = self._order, self.total_batch_size, self.batch.world, self.drop_last
        if isinstance(order, RebalancedOrder):
            return BalancedRows(order, size, world, drop_last, accumulation)
        return SampleRows(order, size, world, drop_last)

    def _length(self, epoch: int) -> int:
        return self._rows(1).length(epoch)

    def _plain_accumulation(self) -> int:
        return self.batch.accumulation if isinstance(self._order, RebalancedOrder) else 1

    def _reseed(self, seed: int) -> None:
        self._order.seed = seed
        self._source.reseed(seed)

    def _groups(self, epoch: int, start: int, accumulation: int, private: bool) -> Iterator[Group]:
        if not private:
            self._order.set_epoch(epoch)
        length = self._length(epoch)
        tasks = cuts(self._rows(accumulation).rows(epoch, start), accumulation, self.batch.rank)
        for cut, batches in self._source.batches(epoch, tasks, private, resumed=start > 0):
            yield Group(
                batches=batches,
                ids=[[]] if cut.filler else cut.batches,
                samples=sum(cut.shares),
                epoch=epoch,
                last_in_epoch=cut.last,
                filler=cut.filler,
                position=self._position(epoch, cut.end, cut.last, length),
            )
