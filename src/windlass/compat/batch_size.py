"""Free memory, and find a batch size that fits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from windlass.accelerator.device_cache import clear_device_cache, should_reduce_batch_size
from windlass.core.errors import ModelError
from windlass.core.logs import get_logger

logger = get_logger(__name__)


class NoBatchFitsError(ModelError, RuntimeError):
    """Not even a batch of one sample fits into memory; also a RuntimeError, as scripts expect."""


def release_memory(*objects: Any) -> list[None]:
    """Free memory. Assign the result to the names that were passed: `a, b = release_memory(a, b)`.

    The caller's names hold the last references to the objects, whose memory is free once the names are assigned.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call `function(batch_size, ...)` with smaller and smaller sizes until it does not run out of memory.

    Args:
        function: its first argument is the batch size, which callers do not pass.
        starting_batch_size: the first size. A size that fits is kept for the next call.
        reduce_batch_size_fn: returns the next size; by default nine tenths of the last one, rounded down.

    Raises:
        NoBatchFitsError: a batch of one does not fit. TypeError: the caller passed the batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_arguments(function, args)
        while size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside the handler, because its traceback keeps the batch that did not fit alive.
            smaller = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            logger.warning("out of memory at batch size %d; continuing with %d", size, smaller)
            size = smaller
        raise NoBatchFitsError(
            f"{function.__name__}: no batch fits into memory, not even one of a single sample"
        )

    return fitted


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a call that passes the batch size too, which is the usual mistake."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(args) < len(parameters):
        return
    raise TypeError(
        f"{function.__name__} was called with {len(args)} arguments; leave the batch size out, it is passed as the "
        "first one"
    )
