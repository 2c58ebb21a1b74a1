"""`auto_find_batch_size`: smaller batches if memory runs out, with the same result.

A single process retries an update that ran out of memory at once. With several processes, the others may be waiting in
an exchange that this one has left: then it writes the smaller size into the output folder and exits, and the next job,
started by its launcher or by hand, begins with that size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from windlass.accelerator.device_cache import clear_device_cache, should_reduce_batch_size
from windlass.checkpoint.files import Files
from windlass.checkpoint.strict_json import dump, parse
from windlass.config.plan import UpdateSize
from windlass.core.errors import CheckpointError, MemoryShortError
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.types import State
from windlass.data.loader import Loader
from windlass.data.update_batch import GroupSource
from windlass.engine.executor import Executor
from windlass.trainer.session import Session
from windlass.transforms.buffers import ForwardState

logger, job_logger = get_logger(__name__), get_job_logger(__name__)
Result = TypeVar("Result")
FILE_NAME = "batch_sizes.json"
_LIMIT = 1 << 12  # bytes; a note has about two hundred


class BatchFitter:
    """Finds the largest batches that fit into memory.

    Attributes:
        active: `auto_find_batch_size`.
        train, eval: samples of the largest batches that may fit; None: those of the arguments.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.active = False
        self.train: int | None = None
        self.eval: int | None = None
        self._note_read = False

    def begin(self, active: bool, folder: Path, asked: MemoryNote) -> None:
        """Called first in `train()` and `evaluate()`; reads the note of an earlier attempt of this job once.
        Collective.
        """
        self.active, self._folder, self._asked = active, folder, asked
        if self._note_read or not active:
            return
        self._note_read = True
        notes = self._session.all_ranks.gather_objects(read_note(folder, asked))
        found = [MemoryNote(**note) for note in notes if note is not None]
        # Each disk may have another note, and all ranks need the same sizes: the smallest one fits on every rank.
        self.train = min((note.train for note in found if note.train), default=None)
        self.eval = min((note.eval for note in found if note.eval), default=None)

    def exit_for_smaller(
        self, error: Exception, *, train: int | None = None, eval_: int | None = None
    ) -> None:
        """Write the sizes to try next into the output folder, and raise MemoryShortError."""
        what = f"evaluation batches of {eval_}" if train is None else f"micro-batches of {train}"
        try:
            write_note(self._folder, replace(self._asked, train=train or self.train, eval=eval_ or self.eval))
            noted = f"Wrote to {self._folder} that the next attempt uses {what}"
        except OSError as failure:
            noted = (
                f"Use {what} in the next attempt; that could not be written to the output folder ({failure})"
            )
        why = (
            "Other processes may wait for this one, so it cannot continue alone with smaller batches"
            if self._session.all_ranks.size > 1
            else "A divided model, or one that was updated in the backward, cannot be restored within an update"
        )
        raise MemoryShortError(
            f"{error}\n{why}. {noted}. Start the job again, with resume_from_checkpoint='auto'; "
            "`windlass launch --max_restarts 3` (and torchrun --max-restarts 3) restarts it automatically"
        ) from error

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, loader: object, measure: Callable[[], Result], *, batch_metrics: bool, sharded: bool
    ) -> Result:
        """Return `measure()`, which runs over `loader`; if memory runs out, start it again with smaller batches.

        Args:
            batch_metrics: `compute_metrics` sees each batch, so the evaluation cannot start again.
            sharded: every forward needs all ranks.
        """
        while True:
            try:
                return measure()
            except Exception as error:
                smaller = self._smaller_eval_batch(error, loader, batch_metrics, sharded)
                if smaller is None:
                    raise
            # Outside the handler, whose traceback keeps the memory of the failed attempt alive.
            clear_device_cache(garbage_collection=True)
            assert isinstance(loader, Loader)
            logger.warning(
                "out of memory at evaluation batch size %d; starting the evaluation again with %d",
                loader.batch.micro,
                smaller,
            )
            loader.resize(smaller, 1)
            self.eval = smaller

    def _smaller_eval_batch(
        self, error: Exception, loader: object, batch_metrics: bool, sharded: bool
    ) -> int | None:
        """The size to try next; None if the error must be raised."""
        # A MemoryShortError is a MemoryError too, and has been dealt with.
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return None
        if not self.active:
            error.add_note("auto_find_batch_size=True tries smaller batches; so does a lower batch size")
            return None
        if not isinstance(loader, Loader) or batch_metrics:
            own = not isinstance(loader, Loader)
            why = "the loader makes the batches" if own else "compute_metrics has seen some batches already"
            error.add_note(f"auto_find_batch_size cannot help here ({why}): lower per_device_eval_batch_size")
            return None
        if loader.batch.micro == 1:
            raise MemoryShortError("out of memory with a single sample of the evaluation data") from error
        smaller = loader.batch.micro // 2
        if self._session.all_ranks.size > 1 or sharded:
            self.exit_for_smaller(error, eval_=smaller)
        return smaller


class UpdateFitter:
    """Makes the micro-batches of a run smaller if memory runs out, and changes nothing else. `size` describes the
    micro-batches of an update.
    """

    def __init__(
        self,
        fitter: BatchFitter,
        session: Session,
        model: nn.Module,
        source: GroupSource,
        executor: Executor,
        size: UpdateSize,
    ) -> None:
        self._fitter, self._session, self._model = fitter, session, model
        self._source, self._executor, self.size = source, executor, size
        self._before: ForwardState | None = None
        self._rng: State | None = None
        self._tried: list[int] = []

    def remember(self) -> None:
        """Before the data of an update is requested, if `auto_find_batch_size` is on: copy what a forward changes, and
        the random generators.
        """
        if self._before is None:
            self._before = ForwardState(self._model)
        else:
            self._before.take()
        self._rng = rng_state(self._session.device)

    def too_large(self, error: Exception) -> bool:
        """Return True to retry an update that failed with `error` in smaller micro-batches. Raises MemoryShortError if
        nothing smaller can be tried, or not by this process alone.
        """
        if not should_reduce_batch_size(error) or isinstance(error, MemoryShortError):
            return False
        unchanged = self._executor.abandon()
        if not self._fitter.active:
            error.add_note(
                "auto_find_batch_size=True continues with smaller micro-batches, and as many samples in an update"
            )
            return False
        # With updates in the backward (`can_undo` is False) some layers have changed by now: a new process can begin
        # again from a checkpoint. Otherwise the optimizer stopped half way, which smaller batches do not prevent.
        partly = not unchanged and not self._executor.can_undo
        if not unchanged and not partly:
            error.add_note(
                "the optimizer ran out of memory while it changed the weights; smaller batches would not help. "
                "Resume from the last checkpoint with an optimizer that needs less memory"
            )
            return False
        size = self.size
        self._tried.append(size.micro)
        if size.micro == 1:
            tried = ", ".join(map(str, self._tried))
            raise MemoryShortError(f"out of memory at every micro-batch size: tried {tried}") from error
        if self._session.all_ranks.size > 1 or self._executor.strategy.sharded or partly:
            self._fitter.exit_for_smaller(error, train=size.within(size.micro // 2).micro)
        return True

    def shrink(self) -> dict[str, int]:
        """Restore what the failed update changed, and make micro-batches smaller. Return a row for the log."""
        size = self.size
        assert self._before is not None, "`remember` was called before any data was read"
        assert self._rng is not None
        self._before.restore()
        load_rng_state(self._rng, self._session.device)
        clear_device_cache(garbage_collection=True)
        smaller = size.within(size.micro // 2)
        assert isinstance(self._source, Loader), "other loaders are refused before training"
        self._source.resize(smaller.micro, smaller.accumulation)
        self.size, self._fitter.train = smaller, smaller.micro
        logger.warning(
            "out of memory at micro-batch size %d; continuing with %d x %d samples in an update, as many as before",
            size.micro,
            smaller.accumulation,
            smaller.micro,
        )
        return {
            "micro_batch_too_large": size.micro,
            "micro_batch_size": smaller.micro,
            "micro_batches": smaller.accumulation,
        }


# --- the note for the next attempt -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryNote:
    """Sizes in samples.

    Attributes:
        asked_train, asked_accumulation, asked_eval: the sizes in the arguments for which the others were found.
        train, eval: the largest batches that may fit; None if those of the arguments did.
    """

    asked_train: int
    asked_accumulation: int
    asked_eval: int
    train: int | None
    eval: int | None

    @property
    def asked(self) -> tuple[int, int, int]:
        return self.asked_train, self.asked_accumulation, self.asked_eval


def write_note(folder: Path, note: MemoryNote) -> None:
    """Write the note atomically. If several processes do so at once, one of their notes stays."""
    files, target = Files(), folder / FILE_NAME
    partial = folder / f"{FILE_NAME}.{os.getpid()}.tmp"  # several ranks may run out of memory at once
    files.ensure_folder(folder)
    partial.unlink(missing_ok=True)  # of a killed process with this id: only new files are written
    files.write(partial, [dump(asdict(note), str(target))])
    files.rename(partial, target)
    files.sync_folder(folder)


def read_note(folder: Path, like: MemoryNote) -> dict[str, Any] | None:
    """The note of an earlier attempt with the same arguments as `like`, as plain data; None if there is none.

    One that is damaged or cannot be read is ignored with a warning: then the sizes are determined again.
    """
    path = folder / FILE_NAME
    try:
        if not path.exists():
            return None
        note = _checked(parse(Files().read(path, _LIMIT), str(path)))
    except (CheckpointError, OSError) as error:
        job_logger.warning("%s: ignored, batch sizes will be found again", error)
        return None
    if note.asked != like.asked:
        return None
    job_logger.warning(
        "out of memory in an earlier attempt of this job (%s); using micro-batches of at most %s, evaluation batches "
        "of at most %s. Remove that file to try the sizes of the arguments again",
        path,
        note.train or note.asked_train,
        note.eval or note.asked_eval,
    )
    return asdict(note)


def _checked(values: Any) -> MemoryNote:
    if not isinstance(values, dict) or values.keys() != MemoryNote.__dataclass_fields__.keys():
        raise CheckpointError(f"{FILE_NAME} does not hold the names of a note")
    for name, value in values.items():
        optional = value is None and not name.startswith("asked_")
        # A number beyond any batch is damage.
        if not optional and (type(value) is not int or not 1 <= value <= 1 << 40):
            raise CheckpointError(f"{FILE_NAME}: {name} is not a size")
    return MemoryNote(**values)
