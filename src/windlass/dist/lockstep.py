"""What keeps ranks in step, when their data ends unevenly or one of them fails."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from windlass.core.errors import CheckpointError, PeerError, RankMismatchError, named
from windlass.dist.ending import leaves_others
from windlass.dist.gang import Gang
from windlass.dist.sums import Pending

T = TypeVar("T")
_FAILED = "failed"


@dataclass(slots=True)
class Round(Generic[T]):
    """One round over all ranks."""

    item: T  # what this rank began it with
    going_on: int  # how many ranks have more data
    sums: list[float]  # the other numbers, each summed over ranks


class Lockstep(Generic[T]):
    """Rounds in which every rank reports whether it has more data, and sends a few numbers. Collective: as many on each
    rank.

    A round is one sum on the host. It can be begun before it is needed, so that the numbers travel while the device
    works. A rank without data goes on taking part until no rank has any; what it does meanwhile is the caller's choice:
    repeat earlier data that weighs nothing, or only answer.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._begun: deque[tuple[T, Pending]] = deque()

    @property
    def under_way(self) -> bool:
        """A round was begun and not ended."""
        return bool(self._begun)

    def begin(self, item: T, goes_on: bool, numbers: Sequence[float] = ()) -> None:
        """Begin a round; `item` comes back with its sums."""
        self._begun.append((item, self._gang.start_sum([float(goes_on), *numbers])))

    def end(self) -> Round[T]:
        """The outcome of the oldest round that was begun; waits for the slowest rank to begin it."""
        item, pending = self._begun.popleft()
        going_on, *sums = pending.wait()
        return Round(item, int(going_on), sums)


def answer_until_all_are_done(gang: Gang, width: int) -> None:
    """Take part in rounds of `width` numbers, for a rank that has left, until no other rank goes on."""
    rounds = Lockstep[None](gang)
    while True:
        rounds.begin(None, False, [0.0] * width)
        if not rounds.end().going_on:
            return


def exchange_messages(gang: Gang, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's message. Raises PeerError, with the errors, if another rank failed in `telling_others` instead of
    sending one.
    """
    messages: list[dict[str, Any]] = gang.gather_objects(message)
    failures = [f"rank {rank}: {m[_FAILED]}" for rank, m in enumerate(messages) if _FAILED in m]
    if failures:
        raise PeerError("evaluation stopped here because it failed elsewhere: " + "; ".join(failures))
    return messages


@contextlib.contextmanager
def telling_others(gang: Gang) -> Iterator[None]:
    """Around work that may fail on one rank alone, and is followed by `exchange_messages`.

    The ranks that wait there stop with this one's reason, instead of waiting for their time-out.
    """
    try:
        yield
    except (PeerError, RankMismatchError):
        raise  # the others know already, and have left
    except Exception as error:
        if leaves_others(error):
            raise  # the others may be in another exchange
        with contextlib.suppress(Exception):  # the failure matters more than an error of reporting it
            gang.gather_objects({_FAILED: named(error)})
        raise


def together(
    gang: Gang, work: Callable[[], T], errors: tuple[type[Exception], ...] = (CheckpointError,)
) -> T:
    """Return what `work`, which does not communicate, returns on this rank. Collective. If it fails on a rank, all
    ranks raise CheckpointError with the first reason; but an error that is not one of `errors` stays what it is on the
    rank that has it.
    """
    found, failure, problem = None, None, None
    try:
        found = work()
    except errors as error:
        failure, problem = error, str(error)
    except BaseException as error:
        # The others must not wait for this rank, and report success: nor after an interrupt.
        with contextlib.suppress(Exception):  # the failure matters more than an error of reporting it
            gang.gather_objects(f"rank {gang.rank}: {named(error)}")
        raise
    for reason in gang.gather_objects(problem):
        if reason is not None:
            raise CheckpointError(reason) from failure
    return cast(T, found)
