"""The executor of devices that record the work of an update, and run it as one compiled graph: PyTorch/XLA's."""

from __future__ import annotations

import torch

from windlass.core import xla
from windlass.engine.native import NativeExecutor


class RecordedExecutor(NativeExecutor):
    """Starts the recorded work once per update, after its loss was added to the ledger.

    A loss that is read earlier cuts the graph in two, and another order of operations is another graph to compile.
    """

    dispatch = staticmethod(xla.sync)


def executor_for(device: torch.device) -> type[NativeExecutor]:
    """The class of executors that update after the backward on `device`."""
    return RecordedExecutor if device.type == "xla" else NativeExecutor
