"""The rank and step of an error, which the traceback of one process among many does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch.distributed import DistError

from windlass.core.world import World

# Words of the backends of process groups for a lost connection.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process has terminated")


@contextlib.contextmanager
def telling_where(world: World, updates: Callable[[], int]) -> Iterator[None]:
    """Add the rank and its number of updates to errors of the body, in a job of several processes."""
    try:
        yield
    except Exception as error:
        if world.is_distributed:
            error.add_note(f"This was rank {world.rank} of {world.size}, at step {updates()}.")
            if isinstance(error, DistError) or any(words in str(error) for words in _LOST):
                error.add_note("Another rank ended first, or never came: look for its own error.")
        raise
