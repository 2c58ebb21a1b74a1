"""Free memory, and find a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from windlass.core.errors import ModelError
from windlass.core.logs import get_logger

logger = get_logger(__name__)

# Messages of allocators that raise a plain RuntimeError when memory is exhausted.
_OUT_OF_MEMORY = (
    " out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free cached device memory, after a garbage collection if `garbage_collection` is True."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free memory. Assign the result to the names that were passed: `a, b = release_memory(a, b)`.

    The caller's names hold the last references to the objects, whose memory is free once the names are assigned.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return True if `exception` is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(words in str(exception) for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: calls `function(batch_size, ...)`, with ever smaller sizes until it does not run out of memory.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the first size; a size that fits is kept for the next call.
        reduce_batch_size_fn: gives the next size; by default nine tenths of the last, rounded down.

    Raises:
        ModelError: not even a batch of one fits.
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
            # Outside the handler, whose traceback would hold on to the batch that did not fit.
            smaller = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            logger.warning("a batch of %d does not fit into memory; next is %d", size, smaller)
            size = smaller
        raise ModelError(f"{function.__name__}: no batch fits into memory, not even one of a single sample")

    return fitted


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Calling with the batch size is the usual slip."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(args) < len(parameters):
        return
    raise TypeError(
        f"{function.__name__} was called with {len(args)} arguments; leave the batch size out, it is found and passed "
        "first"
    )
