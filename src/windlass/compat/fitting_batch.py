"""The largest batch that memory holds, for loops that are not the Trainer's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from windlass.compat import batch_size


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    auto_find_batch_size: bool = False,
) -> Any:
    """Decorator: calls `function(batch_size, ...)`. Raises batch_size.NoBatchFitsError if not even a batch of one fits.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the batch size, or the first one to try.
        auto_find_batch_size: after running out of memory, try again with nine tenths of the size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if not auto_find_batch_size:
        return functools.partial(function, batch_size=starting_batch_size)
    return batch_size.find_executable_batch_size(function, starting_batch_size)
