"""What scripts ask about engines before they touch a model's weights."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_deepspeed_zero3_enabled() -> bool:
    """False: no process-wide configuration divides models while they are built. A run that divides its model at stage 3
    of DeepSpeed gathers it itself to save it; `transformers.integrations` has the function that knows its own setting.
    """
    return False


def is_fsdp_managed_module(module: nn.Module) -> bool:
    """Whether a module's parameters lie in shards on several processes."""
    return isinstance(module, FSDPModule)
