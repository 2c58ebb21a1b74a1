"""Memory that a stage of a script takes: how much more is in use afterwards, and how much more was in between.

The Trainer reports peaks by itself (`windlass.metrics.memory`); this is for scripts that measure stages of their own.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from typing import Any, ClassVar

import torch

from windlass.accelerator.device_cache import clear_device_cache
from windlass.metrics.memory import device_peak_bytes, reset_device_peak

_INTERVAL = 0.001  # seconds between two looks at this process's memory


def resident_bytes() -> int | None:
    """Memory that this process has now; None if the system is not Linux."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: torch.device | None) -> int:
    """Memory that tensors take on `device` now; 0 without a device, or if it does not count."""
    if device is None or not hasattr(torch.get_device_module(device), "memory_allocated"):
        return 0
    return int(torch.get_device_module(device).memory_allocated(device))


class _PeakWatch:
    """The most memory that this process had since `start`."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="windlass-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes() or 0)
            if self._ended.wait(_INTERVAL):
                return

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak


class TrainerMemoryTracker:
    """Measures the memory of stages, each named after the method that calls `start` and `stop_and_update_metrics`.

    A stage that begins while another is measured is not measured. Nothing is measured if the system is not Linux.

    Args:
        skip_memory_metrics: measure nothing.

    Attributes:
        cpu, gpu: stage -> bytes at its `begin` and `end`, `alloc` (the difference) and `peaked` (above the end).
        cur_stage: the stage that is measured; None between stages.
    """

    stages: ClassVar[dict[str, str]] = {
        "__init__": "init",
        "train": "train",
        "evaluate": "eval",
        "predict": "test",
    }

    def __init__(self, skip_memory_metrics: bool = False) -> None:
        self.skip_memory_metrics = skip_memory_metrics or resident_bytes() is None
        self.cur_stage: str | None = None
        self.cpu: dict[str, dict[str, int]] = {}
        self.gpu: dict[str, dict[str, int]] = {}
        self.init_reported = False
        self._device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

    def start(self) -> None:
        """Begin the stage of the calling method."""
        if self.skip_memory_metrics or self.cur_stage not in (None, stage := self._caller()):
            return
        self.cur_stage = stage
        gc.collect()
        if self._device is not None:
            clear_device_cache()
            reset_device_peak(self._device)
        self._begin = self._in_use()
        self._watch = _PeakWatch()

    def stop(self, stage: str) -> None:
        """End `stage`, if it is the one that is measured."""
        if self.skip_memory_metrics or self.cur_stage != stage:
            return
        peaks = self._watch.stop(), 0 if self._device is None else device_peak_bytes(self._device) or 0
        clear_device_cache(garbage_collection=True)
        for figures, begin, end, peak in zip(
            (self.cpu, self.gpu), self._begin, self._in_use(), peaks, strict=True
        ):
            figures[stage] = {"begin": begin, "end": end, "alloc": end - begin, "peaked": max(0, peak - end)}
        self.cur_stage = None

    def update_metrics(self, stage: str, metrics: dict[str, Any]) -> None:
        """Add the figures of `stage` to `metrics`; those of the first stage come with those of `__init__`."""
        if self.skip_memory_metrics or self.cur_stage not in (None, stage):
            return
        reported = [stage] if self.init_reported else ["init", stage]
        self.init_reported = True
        kinds = {"cpu": self.cpu} | ({} if self._device is None else {"gpu": self.gpu})
        for name in reported:
            for kind, figures in kinds.items():
                for figure in ("alloc", "peaked"):
                    if name in figures:
                        metrics[f"{name}_mem_{kind}_{figure}_delta"] = figures[name][figure]
        if "init" in reported:
            found = {kind: figures["init"]["begin"] for kind, figures in kinds.items() if "init" in figures}
            metrics.update({f"before_init_mem_{kind}": begin for kind, begin in found.items()})

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End the stage of the calling method and add its figures to `metrics`."""
        if self.skip_memory_metrics:
            return
        stage = self._caller()
        self.stop(stage)
        if metrics is not None:
            self.update_metrics(stage, metrics)

    def _caller(self) -> str:
        """The stage of the method that called the public method which asks."""
        name = inspect.stack(context=0)[2].function
        if name not in self.stages:
            known = ", ".join(self.stages)
            raise ValueError(f"memory is measured in methods named {known}; this one is named {name}")
        return self.stages[name]

    def _in_use(self) -> tuple[int, int]:
        return resident_bytes() or 0, device_bytes(self._device)
