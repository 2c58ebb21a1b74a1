"""Which executor updates after the backward on a device."""

from __future__ import annotations

import torch

from windlass.engine.native import NativeExecutor
from windlass.engine.recorded import RecordedExecutor


def executor_for(device: torch.device) -> type[NativeExecutor]:
    """The class of executors for `device`."""
    return RecordedExecutor if device.type == "xla" else NativeExecutor
