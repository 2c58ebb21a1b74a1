"""Autocast: forwards in a lower precision than the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from windlass.config.plan import PrecisionPlan

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_context(plan: PrecisionPlan, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that returns the context of one forward; a null context for fp32.

    Each call returns a new one: a `torch.autocast` object stores the state on entry, so if the same object were entered
    twice (a forward inside a forward), autocast would stay enabled.
    """
    dtype = COMPUTE_DTYPES.get(plan.compute)
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=dtype)
