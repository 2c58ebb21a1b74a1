"""Peak memory of this process and its device, read from counters: nothing waits for the device."""

from __future__ import annotations

import sys

import torch


def process_peak_bytes() -> int | None:
    """The most resident memory this process ever had, in bytes; None where the system does not say (Windows)."""
    if sys.platform == "linux":
        return _linux_peak()
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def _linux_peak() -> int | None:
    """From the kernel's own status: `getrusage` would count the launcher's peak too, which a child inherits."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def device_peak_bytes(device: torch.device) -> int | None:
    """Most memory taken by tensors on `device` since `reset_device_peak`, in bytes; None where not counted."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def reset_device_peak(device: torch.device) -> None:
    """Start counting the device's peak anew."""
    if device.type != "cpu" and hasattr(torch.get_device_module(device), "reset_peak_memory_stats"):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def memory_metrics(prefix: str, device: torch.device) -> dict[str, float]:
    """`{prefix}_peak_memory_process_gib` and `{prefix}_peak_memory_device_gib`, where known."""
    peaks = {"process": process_peak_bytes(), "device": device_peak_bytes(device)}
    return {f"{prefix}_peak_memory_{k}_gib": round(v / 2**30, 3) for k, v in peaks.items() if v is not None}
