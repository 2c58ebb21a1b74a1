"""Peak memory of this process and its device, read from counters without a host sync."""

from __future__ import annotations

import sys
from typing import Any

import torch


def process_peak_bytes() -> int | None:
    """Peak resident memory of this process in bytes; None if the system does not report it (Windows)."""
    if sys.platform == "linux":
        return _linux_peak()
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def _linux_peak() -> int | None:
    """From `/proc`: `getrusage` would include the peak of the launcher, which a child process inherits."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def device_peak_bytes(device: torch.device) -> int | None:
    """Peak memory of tensors on `device` since `reset_device_peak`, in bytes; None if it is not counted."""
    counters = _counters(device)
    return None if counters is None else int(counters.max_memory_allocated(device))


def reset_device_peak(device: torch.device) -> None:
    """Reset the peak of `device`."""
    counters = _counters(device)
    if counters is not None:
        counters.reset_peak_memory_stats(device)


def _counters(device: torch.device) -> Any:
    """PyTorch's module of the device if it counts memory; None if not (the CPU, MPS, XLA)."""
    if device.type in ("cpu", "xla"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def memory_metrics(prefix: str, device: torch.device) -> dict[str, float]:
    """`{prefix}_peak_memory_process_gib` and `{prefix}_peak_memory_device_gib`, if known."""
    peaks = {"process": process_peak_bytes(), "device": device_peak_bytes(device)}
    return {f"{prefix}_peak_memory_{k}_gib": round(v / 2**30, 3) for k, v in peaks.items() if v is not None}
