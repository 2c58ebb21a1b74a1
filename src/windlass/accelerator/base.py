"""What the parts of `Accelerator` have in common."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch

from windlass.accelerator.pace import Pace
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.settings import Settings
from windlass.config.plan import PrecisionPlan
from windlass.core.device import choose_device
from windlass.core.world import World
from windlass.dist.gang import Gang, join
from windlass.precision.check import apply_tf32, check_precision
from windlass.precision.scaler import LossScaler, Scaler, UnitScaler


class Core:
    """The attributes that every part of `Accelerator` reads.

    Attributes:
        device: the device of this process.
        mixed_precision: "no", "bf16" or "fp16".
    """

    device: torch.device
    mixed_precision: str
    gradient_state: Pace
    _gang: Gang
    _precision: PrecisionPlan
    _settings: Settings
    _prepared: Prepared
    _of_run: bool
    _backward: Callable[[Any], None] | None

    def _begin(self, gang: Gang, device: torch.device, settings: Settings, of_run: bool) -> None:
        self._gang, self.device, self._settings, self._of_run = gang, device, settings, of_run
        self._precision = settings.precision
        self.mixed_precision = {"fp32": "no"}.get(settings.precision.compute, settings.precision.compute)
        self.gradient_state = Pace(settings.accumulation, 1 if settings.loader.split_batches else gang.size)
        self._prepared = Prepared(_scaler(settings, device), device)
        self._backward = None


def meet(settings: Settings, world: World) -> tuple[Gang, torch.device]:
    """Choose this process's device, and meet the other processes of the job."""
    device = choose_device(settings.cpu, world.local_rank)
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index or 0)
    check_precision(settings.precision, device)
    apply_tf32(settings.precision)
    init = settings.handlers.init
    timeout = settings.dist.timeout_seconds
    if init is not None and isinstance(init.timeout, datetime.timedelta):
        timeout = int(init.timeout.total_seconds())
    # "nccl" is the word's default, which means whatever fits the device.
    backend = None if init is None or init.backend == "nccl" else init.backend
    return join(world, device, timeout, backend, None if init is None else init.init_method), device


def _scaler(settings: Settings, device: torch.device) -> Scaler:
    options = settings.handlers.scaler
    if settings.precision.compute != "fp16" or not options.enabled:
        return UnitScaler(device)
    return LossScaler(
        device, options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval
    )
