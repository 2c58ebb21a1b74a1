"""The one place where the device of a process is chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from windlass.core import xla
from windlass.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

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
        fix = f"{count} {accelerator.type} device(s) here: start at most {count} processes, or use_cpu=True"
        raise ConfigError(Problem("LOCAL_RANK", local_rank, fix))
    return torch.device(accelerator.type, local_rank)


def visible_devices() -> int:
    """How many accelerators this process sees (0 on a machine without any)."""
    import torch

    return torch.accelerator.device_count() if has_accelerator() else 0


def make_current(device: torch.device) -> None:
    """Make `device` the one that new tensors and kernels use if none is named; the CPU, MPS and XLA have only one."""
    import torch

    if device.type not in ("cpu", "mps", "xla"):
        torch.accelerator.set_device_index(device.index or 0)


def start_recorded(device: torch.device) -> None:
    """Start the work that was recorded for `device`, without waiting for its end. Devices other than PyTorch/XLA's
    start each operation at once.
    """
    if device.type == "xla":
        xla.sync()


def backend_for(device: torch.device) -> str:
    """The process-group backend that reduces gradients on `device`."""
    return {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}.get(device.type, "gloo")
