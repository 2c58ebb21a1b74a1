"""`auto_find_batch_size`: what memory does not hold at once is done in smaller pieces, and comes to the same.

In a process of its own an update that ran out of memory is made again at once. Where other processes take part, they
may be waiting inside an exchange that this one has left: then it notes the smaller size in the output folder and ends,
and the job that is started next, by its launcher or by hand, begins with that size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from windlass.accelerator.memory import clear_device_cache, should_reduce_batch_size
from windlass.core.errors import MemoryShortError
from windlass.core.logs import get_logger
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.types import State
from windlass.data.group import GroupSource
from windlass.data.loader import Loader
from windlass.engine.executor import Executor
from windlass.trainer.base import TrainerBase
from windlass.trainer.memory_note import MemoryNote, read_note, write_note
from windlass.transforms.buffers import ForwardState

logger = get_logger(__name__)
Result = TypeVar("Result")


class MemoryMixin(TrainerBase):
    """What a Trainer knows of the batches that fit, for training and for evaluation."""

    _memory_note_read = False

    def _read_memory_note(self) -> None:
        """Take over what an earlier attempt of this job found out, once. Collective."""
        if self._memory_note_read or not self.args.auto_find_batch_size:
            return
        self._memory_note_read = True
        notes = self._gang.gather_objects(read_note(self.output_folder, self._note_for(None, None)))
        found = [MemoryNote(**note) for note in notes if note is not None]
        self._fits = min((note.train for note in found if note.train), default=None)
        self._eval_fits = min((note.eval for note in found if note.eval), default=None)

    def _note_for(self, train: int | None, eval_: int | None) -> MemoryNote:
        args = self.args
        return MemoryNote(
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.per_device_eval_batch_size,
            train,
            eval_,
        )

    def _leave_for_memory(self, error: Exception, train: int | None = None, eval_: int | None = None) -> None:
        """Note what is to be tried next, and end this process.

        Raises:
            MemoryShortError: always.
        """
        what = f"evaluation batches of {eval_}" if train is None else f"micro-batches of {train}"
        try:
            write_note(self.output_folder, self._note_for(train or self._fits, eval_ or self._eval_fits))
            noted = f"{self.output_folder} notes that {what} are tried next"
        except OSError as failure:
            noted = f"{what} are to be tried next, which could not be noted ({failure}): set the batch size to that"
        why = (
            "Other processes may wait for this one, so it cannot go on alone with smaller batches"
            if self._gang.size > 1
            else "A sharded model cannot be put back into the middle of an update"
        )
        raise MemoryShortError(
            f"{error}\n{why}. {noted}. Start the job again, with resume_from_checkpoint='auto'; "
            "`windlass launch --max_restarts 3` (and torchrun --max-restarts 3) starts it by itself"
        ) from error

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _in_batches_that_fit(self, loader: object, measure: Callable[[], Result]) -> Result:
        """`measure()`, which runs over `loader`: begun anew with smaller batches where memory does not hold them."""
        while True:
            try:
                return measure()
            except Exception as error:
                smaller = self._smaller_eval_batch(error, loader)
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
            self._eval_fits = smaller

    def _smaller_eval_batch(self, error: Exception, loader: object) -> int | None:
        """The size to try next; None where the error has to stand."""
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return None
        if not self.args.auto_find_batch_size:
            error.add_note("auto_find_batch_size=True tries smaller batches; so does a lower batch size")
            return None
        if not isinstance(loader, Loader) or self.args.batch_eval_metrics:
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
        if self._gang.size > 1 or self._strategy.sharded:
            self._leave_for_memory(error, eval_=smaller)
        return smaller


class Fitting:
    """Makes the micro-batches of a run smaller when memory does not hold them, and leaves no other trace of it.

    Args:
        source: where the run's data comes from.
    """

    def __init__(self, trainer: MemoryMixin, source: GroupSource, executor: Executor) -> None:
        self._trainer, self._source, self._executor = trainer, source, executor
        self._active = bool(trainer.args.auto_find_batch_size)
        self._before: ForwardState | None = None
        self._rng: State | None = None
        self._tried: list[int] = []

    def remember(self) -> None:
        """Before the data of an update is asked for: what a forward changes, and what reading ahead draws."""
        if not self._active:
            return
        if self._before is None:
            self._before = ForwardState(self._trainer.model)
        else:
            self._before.take()
        self._rng = rng_state(self._trainer._device)

    def too_large(self, error: Exception) -> bool:
        """Whether the update that broke off with `error` shall be tried again in smaller micro-batches.

        Raises:
            MemoryShortError: nothing smaller can be tried, or not by this process alone.
        """
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return False
        unchanged = self._executor.abandon()
        if not self._active:
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
        size = self._trainer._update_size
        self._tried.append(size.micro)
        if size.micro == 1:
            tried = ", ".join(map(str, self._tried))
            raise MemoryShortError(
                f"memory does not hold a micro-batch of any size: tried {tried}"
            ) from error
        if self._trainer._gang.size > 1 or self._executor.strategy.sharded:
            self._trainer._leave_for_memory(error, train=size.within(size.micro // 2).micro)
        return True

    def shrink(self) -> int:
        """Put back what the update that broke off changed, and cut the data smaller from its samples on; gives the
        number of micro-batches of an update.
        """
        trainer, size = self._trainer, self._trainer._update_size
        assert self._before is not None, "`remember` was called before any data was read"
        assert self._rng is not None
        self._before.restore()
        load_rng_state(self._rng, trainer._device)
        clear_device_cache(garbage_collection=True)
        smaller = size.within(size.micro // 2)
        assert isinstance(self._source, Loader), "any other is refused before training"
        self._source.resize(smaller.micro, smaller.accumulation)
        trainer._adopt_update_size(smaller)
        trainer._fits = smaller.micro
        logger.warning(
            "memory does not hold a micro-batch of %d: updates are made of %d x %d samples from here on, which is as "
            "many as before", size.micro, smaller.accumulation, smaller.micro,
        )  # fmt: skip
        trainer.log(
            {
                "micro_batch_too_large": size.micro,
                "micro_batch_size": smaller.micro,
                "micro_batches": smaller.accumulation,
            }
        )
        return smaller.accumulation
