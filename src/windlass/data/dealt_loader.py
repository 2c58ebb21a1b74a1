"""What the Trainer's loaders and those of user loops have in common: a position, and groups of batches from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.types import State
from windlass.data.batch_reader import DealtBatch
from windlass.data.bookmark import Bookmark
from windlass.data.update_batch import GroupSource, UpdateBatch

logger = get_logger(__name__)


@dataclass(slots=True)
class LoaderPosition:
    """The position of a loader in its data."""

    seed: int
    epoch: int = 0  # the current pass, or the next one
    consumed: int = 0  # position in it, in the reader's unit
    resume: int = 0  # where the next pass of a user's loop begins, once; 0 after that
    # Lets a stream be entered at `consumed`, or where the loaded state was taken
    bookmark: Bookmark | None = None
    running: int = 0  # passes under way


class DealtLoader(DataLoader[Any], GroupSource):
    """A `DataLoader` whose samples are dealt to ranks, and whose whole state is a position.

    User code iterates it and gets this rank's batches; a Trainer takes groups of them, from any position. Subclasses
    implement the reading and the position.
    """

    is_dealt = True  # False in subclasses that scripts construct: preparing such a loader deals its samples

    def __init__(self, dataset: Any, seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._place = LoaderPosition(seed)
        # Some rows of the data, which a checkpoint keeps with the position.
        self._shown: list[list[int]] | None = None

    @property
    def epoch(self) -> int:
        """The current pass, or the next one."""
        return self._place.epoch

    @property
    def own_parts(self) -> bool:
        """Every rank reads a part of its own; positions of samples in it are not those of other ranks."""
        return False

    @property
    def must_go_in_step(self) -> bool:
        """Reading may exchange numbers with the other ranks: all must read equally many batches, fillers included."""
        return False

    def __len__(self) -> int:
        """Batches of a pass; if the last row is short, a rank may have one less. Raises TypeError for a stream of
        unknown length.
        """
        count = self.count(self.epoch)
        if count is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its loader has none")
        return count

    def count(self, epoch: int, start: int = 0) -> int | None:
        """Batches of pass `epoch`, from position `start` on; None for a stream without a length."""
        raise NotImplementedError

    def position_in(self, state: State) -> int:
        """Where `state`, a `state_dict`, was taken, in the unit of `count`."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken, with its seed; warn if that is another place, or other samples follow."""
        place, seed = self._place, int(state["seed"])
        if seed != place.seed:
            self._reseed(seed)
            place.seed = seed
        place.epoch, place.bookmark = int(state["epoch"]), state.get("bookmark")
        place.consumed = place.resume = self.position_in(state)
        self._compare(state)
        self._compare_rows(state.get("rows"))

    def _compare_rows(self, then: list[list[int]] | None) -> None:
        """Warn if the data has other rows than `then`, in the same places."""
        now = self._shown
        if now is None or then is None or now == then or [n for n, _ in now] != [n for n, _ in then]:
            return
        changed = [one[0] for one, other in zip(now, then, strict=True) if one != other]
        logger.warning(
            f"the dataset has other rows than when the checkpoint was written: of the rows {[n for n, _ in now]}, "
            f"which are compared, {changed} differ. Reading continues at its position in the present ones; give the "
            "dataset of then to train what an uninterrupted run would"
        )

    def _reseed(self, seed: int) -> None:
        """Read with another seed from now on."""
        raise NotImplementedError

    def _compare(self, state: State) -> None:
        """Warn if reading does not continue as it would have where the loaded `state` was taken."""
        raise NotImplementedError

    def groups_per_epoch(self, accumulation: int) -> int | None:
        """Updates of a pass; None for a stream without a length."""
        count = self.count(self.epoch)
        return None if count is None else -(-count // accumulation)

    def groups_left(self, position: State, accumulation: int) -> int | None:
        """Updates from `position` (a `state_dict`) to the end of its pass, in the sizes of this loader."""
        count = self.count(int(position["epoch"]), self.position_in(position))
        return None if count is None else -(-count // accumulation)

    def groups(self, accumulation: int) -> Iterator[UpdateBatch]:
        """The groups from the current position to the end of its pass, in host memory.

        The next call continues with the next pass. All ranks get the same number of groups. Raises DataError if there
        is no batch.
        """
        place, rows = self._place, list[DealtBatch]()
        epoch, start, place.resume = place.epoch, place.consumed, 0
        of_pass: State | None = None
        for row in self._training_pass(epoch, start, accumulation):
            rows.append(row)
            if len(rows) == accumulation or row.last:
                of_pass = self._of_pass(epoch) if of_pass is None else of_pass
                # Before the group is returned: a checkpoint after its update stores the position behind it.
                self._move_after(row, epoch)
                yield self._group(rows, epoch, of_pass)
                rows = []
        # The last row of a pass moves on to the next epoch, so there was none.
        if place.epoch == epoch:
            raise DataError(
                f"the loader of {type(self.dataset).__name__} gave no batch (epoch {epoch}, from position {start} on): "
                "it is empty, drop_last drops all of it, or the data has become shorter since the checkpoint was "
                "written."
            )

    def _training_pass(self, epoch: int, start: int, accumulation: int) -> Iterator[DealtBatch]:
        raise NotImplementedError

    def _move_after(self, row: DealtBatch, epoch: int) -> None:
        place = self._place
        place.epoch, place.consumed = (epoch + 1, 0) if row.last else (epoch, row.end)
        place.bookmark = row.bookmark

    def _group(self, rows: list[DealtBatch], epoch: int, of_pass: State) -> UpdateBatch:
        own = [row for row in rows if not row.filler]
        return UpdateBatch(
            batches=[row.batch for row in own or rows[:1]],
            ids=[row.ids for row in own] or [[]],
            dealt_samples=sum([sum(row.shares) for row in rows]),
            epoch=epoch,
            last_in_epoch=rows[-1].last,
            filler=not own,
            position=self._position(of_pass),
        )

    def _of_pass(self, epoch: int) -> State:
        """The entries of a position that stay the same in a pass, collected once; they may cost as much as a group."""
        return {} if self._shown is None else {"rows": self._shown}

    def _position(self, of_pass: State) -> State:
        """The present position, with the entries of its pass."""
        return {**of_pass, "epoch": self._place.epoch, "consumed": self._place.consumed}

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        """A pass of this rank's batches, each with the positions of its samples in the dataset.

        All ranks get the same number of batches. The positions of a filler are None.
        """
        raise NotImplementedError

    def batches_with_ids(self) -> Iterator[tuple[list[int], Any]]:
        """As `batches_in_step`, without fillers."""
        return ((ids, batch) for ids, batch in self.batches_in_step() if ids is not None)
