"""How ranks that work together learn that one of them failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from windlass.core.errors import WindlassError
from windlass.dist.gang import Gang

_FAILED = "failed"


class PeerError(WindlassError):
    """Another rank failed, so the work they share cannot be finished here."""


def agree(gang: Gang, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's message; the meeting point at which a rank learns that another one failed.

    Raises:
        PeerError: another rank failed in `telling_others` instead; its words are quoted.
    """
    messages: list[dict[str, Any]] = gang.gather_objects(message)
    failures = [f"rank {rank}: {m[_FAILED]}" for rank, m in enumerate(messages) if _FAILED in m]
    if failures:
        raise PeerError("evaluation stopped here because it failed elsewhere: " + "; ".join(failures))
    return messages


@contextlib.contextmanager
def telling_others(gang: Gang) -> Iterator[None]:
    """Around work that may fail on one rank alone, and is followed by `agree`.

    The ranks that wait there stop with this one's reason, instead of waiting for their time-out.
    """
    try:
        yield
    except PeerError:
        raise  # the others know already, and have left
    except Exception as error:
        with contextlib.suppress(Exception):  # the failure to be told of matters more than the telling
            gang.gather_objects({_FAILED: f"{type(error).__name__}: {error}"})
        raise
