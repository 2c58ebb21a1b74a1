"""Memory of the stages of a Trainer: how much more is in use after each, and how much more was in use within it.

Peaks of this process and its device are read from counters, without a host sync.
"""

from __future__ import annotations

import gc
import os
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


INIT = "init"


class StageMemory:
    """Measures stages one after the other, without cost between their ends.

    Memory of the process is counted on Linux only. If the system cannot reset its peak, one that stays below an earlier
    peak is reported as the larger of the memory at both ends.

    Attributes:
        stage: the one that is measured; None between stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stage: str | None = None
        self._begin: dict[str, int] = {}
        self._earlier_peaks: dict[str, int] = {}
        self._stale_peak = 0
        self._of_init: dict[str, float] = {}
        self._mark: tuple[int, int] | None = None

    def begin(self, stage: str, *, within: bool = False) -> None:
        """Begin a stage. One that is `within` another is not measured by itself."""
        if within:
            # The peak of the device is counted afresh, for the evaluation's own report.
            self._earlier_peaks["gpu"] = max(self._peaks().get("gpu", 0), self._earlier_peaks.get("gpu", 0))
            reset_device_peak(self._device)
            return
        gc.collect()
        reset_device_peak(self._device)
        _reset_process_peak()
        self.stage, self._begin = stage, self._in_use()
        self._earlier_peaks = {}
        self._stale_peak = process_peak_bytes() or 0

    def end(self, stage: str) -> dict[str, float]:
        """End a stage.

        Returns:
            `{stage}_mem_{cpu|gpu}_alloc_delta` and `..._peaked_delta` (above the end) in bytes, if this stage was
            measured; with the first one those of the construction and `before_init_mem_{cpu|gpu}`.
        """
        if stage != self.stage:
            return {}
        peaks = self._peaks()
        # Memory in cycles is not in use, and would be counted as what the stage keeps.
        gc.collect()
        self.stage, metrics = None, dict[str, float]()
        for kind, now in self._in_use().items():
            peak = max(peaks.get(kind, 0), self._earlier_peaks.get(kind, 0), self._begin[kind])
            metrics[f"{stage}_mem_{kind}_alloc_delta"] = now - self._begin[kind]
            metrics[f"{stage}_mem_{kind}_peaked_delta"] = max(0, peak - now)
        if stage == INIT:
            self._of_init = {**metrics, **{f"before_init_mem_{k}": v for k, v in self._begin.items()}}
            return {}
        reported, self._of_init = {**self._of_init, **metrics}, {}
        return reported

    def mark(self, held: int) -> None:
        """Note what is in use before a run, of which `held` bytes belong to it: its model. Costs two small reads."""
        now, peak = self._now_and_peak()
        self._mark = None if now is None or peak is None else (now - held, peak)

    def growth(self) -> int | None:
        """The most bytes that were in use since `mark`, beyond what did not belong to the run; None if that is not
        known: nothing counts them, or an earlier peak was higher.
        """
        _, peak = self._now_and_peak()
        if self._mark is None or peak is None or peak <= self._mark[1]:
            return None
        return peak - self._mark[0]

    def _now_and_peak(self) -> tuple[int | None, int | None]:
        if self._device.type == "cpu":
            return resident_bytes(), process_peak_bytes()
        peak = device_peak_bytes(self._device)  # since an evaluation within the run, if there was one
        return device_bytes(self._device), peak and max(peak, self._earlier_peaks.get("gpu", 0))

    def report(self, stage: str, prefix: str) -> dict[str, float]:
        """End a stage: its figures, and the peaks of `memory_metrics` under `prefix`."""
        return {**memory_metrics(prefix, self._device), **self.end(stage)}

    def _in_use(self) -> dict[str, int]:
        """Bytes in use by the process and by tensors on its device, as far as they are counted."""
        found = {"cpu": resident_bytes(), "gpu": device_bytes(self._device)}
        return {name: value for name, value in found.items() if value is not None}

    def _peaks(self) -> dict[str, int]:
        """The peaks since the stage began."""
        process = process_peak_bytes() or 0
        found = {"cpu": process if process > self._stale_peak else 0}
        return {**found, "gpu": device_peak_bytes(self._device) or 0}


def device_bytes(device: torch.device) -> int | None:
    """Memory of tensors on `device` in bytes; None if it is not counted."""
    if device_peak_bytes(device) is None:
        return None
    return int(torch.get_device_module(device).memory_allocated(device))


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reset_process_peak() -> None:
    """Let the peak of this process start at its present memory, if the system can do that."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return
