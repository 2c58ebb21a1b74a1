"""`auto_find_batch_size`: what memory does not hold at once is done in smaller pieces, with the same result.

In a process of its own an update that ran out of memory is repeated at once. Where other processes take part, they may
be waiting inside an exchange that this one has left: then it notes the smaller size in the output folder and ends, and
the job that is started next, by its launcher or by hand, begins with that size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from windlass.accelerator.device_cache import clear_device_cache, should_reduce_batch_size
from windlass.assemble.batch import UpdateSize
from windlass.core.errors import MemoryShortError
from windlass.core.logs import get_logger
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.types import State
from windlass.data.group import GroupSource
from windlass.data.loader import Loader
from windlass.engine.executor import Executor
from windlass.trainer.memory_note import MemoryNote, read_note, write_note
from windlass.trainer.session import Session
from windlass.transforms.buffers import ForwardState

logger = get_logger(__name__)
Result = TypeVar("Result")


class BatchFitter:
    """Owner of what a Trainer knows about the batches that memory holds.

    Attributes:
        active: `auto_find_batch_size`.
        train, eval: samples of the largest batches that memory may hold; None: those asked for.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.active = False
        self.train: int | None = None
        self.eval: int | None = None
        self._note_read = False

    def begin(self, active: bool, folder: Path, asked: MemoryNote) -> None:
        """A `train()` or `evaluate()` begins. What an earlier attempt of this job noted is read once. Collective.

        Args:
            folder: the output folder.
            asked: the sizes that the arguments ask for.
        """
        self.active, self._folder, self._asked = active, folder, asked
        if self._note_read or not active:
            return
        self._note_read = True
        notes = self._session.gang.gather_objects(read_note(folder, asked))
        found = [MemoryNote(**note) for note in notes if note is not None]
        self.train = min((note.train for note in found if note.train), default=None)
        self.eval = min((note.eval for note in found if note.eval), default=None)

    def exit_for_smaller(
        self, error: Exception, *, train: int | None = None, eval_: int | None = None
    ) -> None:
        """Note the sizes to try next, and end this process.

        Raises:
            MemoryShortError: always.
        """
        what = f"evaluation batches of {eval_}" if train is None else f"micro-batches of {train}"
        try:
            write_note(self._folder, replace(self._asked, train=train or self.train, eval=eval_ or self.eval))
            noted = f"{self._folder} notes that {what} are tried next"
        except OSError as failure:
            noted = f"{what} are to be tried next, which could not be noted ({failure}): set the batch size to that"
        why = (
            "Other processes may wait for this one, so it cannot go on alone with smaller batches"
            if self._session.gang.size > 1
            else "A sharded model cannot be put back into the middle of an update"
        )
        raise MemoryShortError(
            f"{error}\n{why}. {noted}. Start the job again, with resume_from_checkpoint='auto'; "
            "`windlass launch --max_restarts 3` (and torchrun --max-restarts 3) starts it by itself"
        ) from error

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, loader: object, measure: Callable[[], Result], *, batch_metrics: bool, sharded: bool
    ) -> Result:
        """`measure()`, which runs over `loader`: begun again with smaller batches if memory does not hold them.

        Args:
            batch_metrics: `compute_metrics` sees each batch, so nothing can begin again.
            sharded: every forward needs all ranks.
        """
        while True:
            try:
                return measure()
            except Exception as error:
                smaller = self._smaller_eval_batch(error, loader, batch_metrics, sharded)
                if smaller is None:
                    raise
            # Outside the handler, whose traceback holds on to all that did not fit.
            clear_device_cache(garbage_collection=True)
            assert isinstance(loader, Loader)
            logger.warning(
                "memory does not hold an evaluation batch of %d: evaluation begins anew with %d",
                loader.batch.micro, smaller,
            )  # fmt: skip
            loader.resize(smaller, 1)
            self.eval = smaller

    def _smaller_eval_batch(
        self, error: Exception, loader: object, batch_metrics: bool, sharded: bool
    ) -> int | None:
        """The size to try next; None if the error stays."""
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return None
        if not self.active:
            error.add_note("auto_find_batch_size=True tries smaller batches; so does a lower batch size")
            return None
        if not isinstance(loader, Loader) or batch_metrics:
            why = (
                "compute_metrics has seen some batches already"
                if isinstance(loader, Loader)
                else "the loader cuts"
            )
            error.add_note(f"auto_find_batch_size cannot help here ({why}): lower per_device_eval_batch_size")
            return None
        if loader.batch.micro == 1:
            raise MemoryShortError(
                "memory does not hold even a single sample of the evaluation data"
            ) from error
        smaller = loader.batch.micro // 2
        if self._session.gang.size > 1 or sharded:
            self.exit_for_smaller(error, eval_=smaller)
        return smaller


class UpdateFitter:
    """Makes the micro-batches of a run smaller when memory does not hold them, and leaves no other trace of it.

    Attributes:
        size: what updates are made of.

    Args:
        source: where the run's data comes from.
    """

    def __init__(
        self, fitter: BatchFitter, session: Session, model: nn.Module, source: GroupSource, executor: Executor,
        size: UpdateSize,
    ) -> None:  # fmt: skip
        self._fitter, self._session, self._model = fitter, session, model
        self._source, self._executor, self.size = source, executor, size
        self._before: ForwardState | None = None
        self._rng: State | None = None
        self._tried: list[int] = []

    def remember(self) -> None:
        """Before the data of an update is asked for: what a forward changes, and what reading ahead draws."""
        if not self._fitter.active:
            return
        if self._before is None:
            self._before = ForwardState(self._model)
        else:
            self._before.take()
        self._rng = rng_state(self._session.device)

    def too_large(self, error: Exception) -> bool:
        """Return True to retry an update that failed with `error` in smaller micro-batches.

        Raises:
            MemoryShortError: nothing smaller can be tried, or not by this process alone.
        """
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return False
        unchanged = self._executor.abandon()
        if not self._fitter.active:
            error.add_note(
                "auto_find_batch_size=True goes on with smaller micro-batches, and with as many samples in an update"
            )
            return False
        if not unchanged:
            error.add_note(
                "the optimizer ran out of memory while it changed the weights: smaller batches would not help it. "
                "Resume from the last checkpoint with an optimizer that needs less"
            )
            return False
        size = self.size
        self._tried.append(size.micro)
        if size.micro == 1:
            tried = ", ".join(map(str, self._tried))
            raise MemoryShortError(
                f"memory does not hold a micro-batch of any size: tried {tried}"
            ) from error
        if self._session.gang.size > 1 or self._executor.strategy.sharded:
            self._fitter.exit_for_smaller(error, train=size.within(size.micro // 2).micro)
        return True

    def shrink(self) -> dict[str, int]:
        """Put back what the failed update changed, and cut the data smaller from its samples on.

        Returns:
            What to report.
        """
        size = self.size
        assert self._before is not None, "`remember` was called before any data was read"
        assert self._rng is not None
        self._before.restore()
        load_rng_state(self._rng, self._session.device)
        clear_device_cache(garbage_collection=True)
        smaller = size.within(size.micro // 2)
        assert isinstance(self._source, Loader), "any other is refused before training"
        self._source.resize(smaller.micro, smaller.accumulation)
        self.size, self._fitter.train = smaller, smaller.micro
        logger.warning(
            "memory does not hold a micro-batch of %d: updates are made of %d x %d samples from here on, which is as "
            "many as before", size.micro, smaller.accumulation, smaller.micro,
        )  # fmt: skip
        return {
            "micro_batch_too_large": size.micro,
            "micro_batch_size": smaller.micro,
            "micro_batches": smaller.accumulation,
        }
