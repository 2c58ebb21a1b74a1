"""What scripts ask about engines before they touch a model's weights."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_fsdp_managed_module(module: nn.Module) -> bool:
    """Whether a module's parameters lie in shards on several processes."""
    return isinstance(module, FSDPModule)
