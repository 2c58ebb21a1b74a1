"""One pass over a stream: every sample is read with its own seed, from the beginning or from a saved state."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_SAMPLE, derive_seed
from windlass.data.bookmark import (
    Bookmark,
    Places,
    StreamPlace,
    belongs,
    marks_of,
    plain_copy,
    why_read_again,
    why_without_state,
)
from windlass.data.datasets_nodes import with_nodes_of_its_own
from windlass.data.seeding import DatasetEpoch, Sandbox

logger = get_logger(__name__)


class Reading:
    """A pass over a stream.

    Args:
        dataset: can be iterated, from its beginning or from the state that it was given.
        sandbox: keeps the dataset's draws apart from the program's generators.
        seed, epoch: what the randomness of the pass depends on, with each sample's position.
    """

    def __init__(self, dataset: Any, sandbox: Sandbox, seed: int, epoch: int) -> None:
        self._dataset, self._sandbox, self._seed, self._epoch = dataset, sandbox, seed, epoch
        self._dataset_epoch = DatasetEpoch.of(dataset)
        self._position = 0  # of the next sample that the dataset returns
        self._ahead: deque[Any] = deque()
        self._places = Places(dataset)
        self._place_before_peek = StreamPlace(0, None, "")
        self._stream: Iterator[Any] = iter(())

    def begin(self, state: Any = None, at: int = 0) -> None:
        """Begin the pass; with a `state` of the dataset, after its first `at` samples."""
        self._dataset_epoch.set(self._epoch)
        with self._sandbox:
            # -1: a dataset may draw in its `__iter__`, before its first sample, which has 0.
            self._sandbox.seed(derive_seed(STREAM_SAMPLE, self._seed, self._epoch, -1))
            if state is not None:
                self._dataset.load_state_dict(state)
            self._stream = iter(self._dataset)
        self._position = at
        self._ahead.clear()

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer than `count` only at the end of the stream."""
        waiting = min(count, len(self._ahead))
        samples = [self._ahead.popleft() for _ in range(waiting)]
        return samples + self._read(count - waiting) if waiting < count else samples

    def peek(self, count: int) -> list[Any]:
        """The next samples, which `take` returns again."""
        if not self._ahead:
            # After the read below the dataset is ahead of what `take` has returned: its state would skip what waits.
            self._place_before_peek = self.place()
        if len(self._ahead) < count:
            self._ahead.extend(self._read(count - len(self._ahead)))
        return list(self._ahead)[:count]

    def go_to(self, position: int, stretch: int) -> bool:
        """Read up to `position`, `stretch` samples at a time. Return False if the stream ends before it."""
        while self._position < position:
            if not self._read(min(stretch, position - self._position)):
                return False
        return True

    def place(self) -> StreamPlace:
        """The dataset's state now, or a little before; to be called once per row."""
        return self._place_before_peek if self._ahead else self._places.after(self._position)

    def _read(self, count: int) -> list[Any]:
        samples: list[Any] = []
        # Another pass over the same stream may have begun meanwhile.
        if self._dataset_epoch.value != self._epoch:
            self._dataset_epoch.set(self._epoch)
        with self._sandbox:
            try:
                for index in range(self._position, self._position + count):
                    # Before each sample, not once: a pass that is entered in the middle draws the same.
                    self._sandbox.seed(derive_seed(STREAM_SAMPLE, self._seed, self._epoch, index))
                    samples.append(next(self._stream))
            except StopIteration:
                pass
            except Exception as error:
                error.add_note(
                    f"raised while reading sample {self._position + len(samples)} of {type(self._dataset).__name__}"
                )
                raise
        self._position += len(samples)
        return samples


def open_reading(
    dataset: Any,
    sandbox: Sandbox,
    seed: int,
    epoch: int,
    start: int,
    *,
    stretch: int,
    bookmark: Bookmark | None = None,
    log: bool = True,
) -> Reading | None:
    """A pass at sample `start`; None if the stream ends before it.

    A bookmark made there saves reading the samples before. The state is verified: the samples
    that follow must be those that followed when the bookmark was made.

    Args:
        stretch: samples that are read at a time on the way.
        log: log warnings; set in one of the processes that read the same.
    """
    own = with_nodes_of_its_own(dataset)
    beginning = _first_state(own) if own is dataset else None
    if not belongs(bookmark, epoch, start):
        bookmark = None
    if bookmark is not None and start and not why_read_again(own, bookmark, epoch, start):
        reading, trouble = _entered(Reading(own, sandbox, seed, epoch), bookmark, stretch)
        if reading is not None:
            return reading
        # A state that led elsewhere may be in force still: the stream is read from its beginning now.
        if beginning is not None:
            own.load_state_dict(beginning)
        if log:
            logger.warning(
                f"reading {start} samples of the stream again, to continue after them: the state of "
                f"{type(dataset).__name__} did not lead back to its place ({trouble})"
            )
        own = with_nodes_of_its_own(dataset)
    reading = Reading(own, sandbox, seed, epoch)
    reading.begin()
    if not reading.go_to(start, stretch):
        return None
    if bookmark is not None and log and not _follows(reading, bookmark):
        logger.warning(
            f"after sample {start}, {type(dataset).__name__} returns other samples than it did in the run that is "
            "continued: the data has changed, or its order cannot be repeated"
        )
    return reading


# The states that streams had before their first pass in this process. A dataset outlives its loaders: a script may
# train on it again, and by then its state is that of some other place.
_first_states: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _first_state(dataset: Any) -> Any:
    """The state of `dataset` before anything was read of it; None if it has none that is known."""
    if why_without_state(dataset):
        return None
    # A `state_dict` of the user's may fail, and an object that is not hashable raises a TypeError.
    try:
        if dataset not in _first_states:
            _first_states[dataset], _ = plain_copy(dataset.state_dict())
        return _first_states[dataset]
    except Exception:
        return None


def _entered(reading: Reading, bookmark: Bookmark, stretch: int) -> tuple[Reading | None, str]:
    """`reading` after the bookmark's position; or None and the reason."""
    try:
        reading.begin(bookmark["state"], bookmark["at"])
        if reading.go_to(bookmark["position"], stretch) and _follows(reading, bookmark):
            return reading, ""
        return None, "other samples follow there"
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _follows(reading: Reading, bookmark: Bookmark) -> bool:
    marks = bookmark["marks"]
    return marks_of(reading.peek(len(marks))) == marks
