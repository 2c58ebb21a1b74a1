"""The one place where the device of a process is chosen."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from windlass.core import xla
from windlass.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Bytes: blocks of this size are given back, and freed memory beyond so much.
_GIVEN_BACK, _KEPT = 32 << 20, 256 << 20

_hidden = ContextVar("accelerators are hidden", default=False)


@contextlib.contextmanager
def without_accelerators() -> Iterator[None]:
    """Within the body this process is as on a machine without accelerators."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def has_accelerator() -> bool:
    """Whether this process may use an accelerator of PyTorch's own."""
    import torch

    return not _hidden.get() and torch.accelerator.is_available()


def choose_device(use_cpu: bool = False, local_rank: int = 0) -> torch.device:
    """The device this process trains on: PyTorch/XLA's if it is installed, its own accelerator, or the CPU. Raises
    ConfigError if there are fewer accelerators than processes on this machine.
    """
    import torch

    if not use_cpu and not _hidden.get() and xla.is_selected():
        return xla.device()
    if use_cpu or not has_accelerator():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "mps":
        return torch.device("mps")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        fix = (
            f"this process sees {count} {accelerator.type} device(s): start at most {count} processes on a machine, or "
            "let each see the devices of all (Slurm: --gpus-per-node in place of --gpus-per-task), or use_cpu=True"
        )
        raise ConfigError(Problem("LOCAL_RANK", local_rank, fix))
    return torch.device(accelerator.type, local_rank)


def visible_devices() -> int:
    """How many accelerators this process sees (0 on a machine without any)."""
    import torch

    return torch.accelerator.device_count() if has_accelerator() else 0


def make_current(device: torch.device) -> None:
    """Make `device` the one that new tensors and kernels use if none is named; the CPU, MPS and XLA have only one. For
    the CPU, this process keeps freed memory from now on.
    """
    import torch

    if device.type == "cpu":
        _keep_freed_memory()
    elif device.type not in ("mps", "xla"):
        torch.accelerator.set_device_index(device.index or 0)


def _keep_freed_memory() -> None:
    """Let the C library keep what an update frees for the next one, which needs as much: by itself it gives most of
    that back to the system, whose page faults then cost each update of a small model some percent of its time.

    Blocks of 32 MiB and more are still given back, since other sizes of batches would not fit into their gaps: 32 MiB
    is what glibc raises this limit to by itself, once a block of that size is freed. What a user has set stays, and
    other C libraries are left as they are.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.mallopt(_MMAP_THRESHOLD, _GIVEN_BACK)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)


def copies_may_wait(device: torch.device) -> bool:
    """Whether a copy to `device` may end after the call that starts it. What reads a copy on the host would not wait
    for it; and for MPS, PyTorch would read memory of the host that is free by then, and give wrong values.
    """
    return device.type not in ("cpu", "mps")


def start_recorded(device: torch.device) -> None:
    """Start the work that was recorded for `device`, without waiting for its end. Devices other than PyTorch/XLA's
    start each operation at once.
    """
    if device.type == "xla":
        xla.sync()


def backend_for(device: torch.device) -> str:
    """The process-group backend that reduces gradients on `device`."""
    return {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}.get(device.type, "gloo")
