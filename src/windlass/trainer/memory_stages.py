"""Memory of a script's own stages, under the names of transformers' `TrainerMemoryTracker`."""

from __future__ import annotations

import inspect
import sys
from typing import Any, ClassVar

import torch

from windlass.accelerator.device_cache import clear_device_cache
from windlass.metrics.stage_memory import StageMemory


class TrainerMemoryTracker:
    """Measures the memory of stages, each named after the method that calls `start` and `stop_and_update_metrics`.

    A stage that begins while another is measured is not measured. Nothing is measured if the system is not Linux.

    Args:
        skip_memory_metrics: measure nothing.
        memory: what measures; a stage that it measures for others goes on. None: one of its own.

    Attributes:
        cur_stage: the stage that is measured; None between stages.
    """

    stages: ClassVar[dict[str, str]] = {
        "__init__": "init",
        "train": "train",
        "evaluate": "eval",
        "predict": "test",
    }

    def __init__(self, skip_memory_metrics: bool = False, *, memory: StageMemory | None = None) -> None:
        self.skip_memory_metrics = skip_memory_metrics or sys.platform != "linux"
        self.cur_stage: str | None = None
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._memory = memory or StageMemory(device or torch.device("cpu"))
        self._figures: dict[str, float] = {}

    def start(self) -> None:
        """Begin the stage of the calling method."""
        if self.skip_memory_metrics or self.cur_stage not in (None, stage := self._caller()):
            return
        clear_device_cache()
        self.cur_stage = stage
        self._memory.begin(stage, within=self._memory.stage not in (None, stage))

    def stop(self, stage: str) -> None:
        """End `stage`, if it is the one that is measured."""
        if self.skip_memory_metrics or self.cur_stage != stage:
            return
        self._figures, self.cur_stage = self._memory.end(stage), None

    def update_metrics(self, stage: str, metrics: dict[str, Any]) -> None:
        """Add the figures of `stage`, in bytes, to `metrics`; with the first one those of `__init__`."""
        if self.cur_stage in (None, stage):
            metrics.update(self._figures)

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
        name = inspect.stack(context=0)[2].function  # without lines of source, which would be read from files
        if name not in self.stages:
            known = ", ".join(self.stages)
            raise ValueError(f"memory is measured in methods named {known}; this one is named {name}")
        return self.stages[name]
