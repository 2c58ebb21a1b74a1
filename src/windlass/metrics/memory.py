"""Peak memory of this process and its device, read from counters without a host sync."""

from __future__ import annotations

import sys

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
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def reset_device_peak(device: torch.device) -> None:
    """Reset the peak of `device`."""
    if device.type != "cpu" and hasattr(torch.get_device_module(device), "reset_peak_memory_stats"):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def memory_metrics(prefix: str, device: torch.device) -> dict[str, float]:
    """`{prefix}_peak_memory_process_gib` and `{prefix}_peak_memory_device_gib`, if known."""
    peaks = {"process": process_peak_bytes(), "device": device_peak_bytes(device)}
    return {f"{prefix}_peak_memory_{k}_gib": round(v / 2**30, 3) for k, v in peaks.items() if v is not None}
