"""Looking at values in host memory: the one way for code that runs in every step.

A tensor on a device is refused, not fetched: fetching would make the host wait, which such code must never do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read(values: Tensor) -> Any:
    """The number in a scalar tensor, or a list of those in a tensor of one axis. Raises ValueError if the tensor is not
    in host memory.
    """
    if not values.is_cpu:
        raise ValueError(f"a tensor on {values.device} can't be read without waiting for the device")
    return values.tolist()
