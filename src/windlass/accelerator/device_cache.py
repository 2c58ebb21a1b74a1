"""Free cached device memory, and recognize out-of-memory errors."""

from __future__ import annotations

import gc

import torch

# Messages of allocators that raise a plain RuntimeError when memory is exhausted.
_OUT_OF_MEMORY = (
    " out of memory",  # CUDA, HIP, XPU, MPS
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",  # as accelerate reads it: cuDNN does not name memory
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # HPU
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free cached device memory, after a garbage collection if `garbage_collection` is True."""
    if garbage_collection:
        gc.collect()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        # Not `torch.accelerator.empty_cache`, which raises an error on MPS.
        torch.get_device_module(device).empty_cache()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return True if `exception` is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(words in str(exception) for words in _OUT_OF_MEMORY)
