"""Which rank an error is of, and where it was: what the traceback of one process among many does not say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch.distributed import DistError

from windlass.core.world import World

# How the backends of process groups say that the other side has gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process has terminated")


@contextlib.contextmanager
def telling_where(world: World, updates: Callable[[], int]) -> Iterator[None]:
    """Errors of the body that leave a job of several processes say of which rank and step they are.

    Args:
        updates: number of updates that are done.
    """
    try:
        yield
    except Exception as error:
        if world.is_distributed:
            error.add_note(f"This was rank {world.rank} of {world.size}, at step {updates()}.")
            if isinstance(error, DistError) or any(words in str(error) for words in _LOST):
                error.add_note("Another rank ended first, or never came: look for its own error.")
        raise
