"""What scripts ask about engines before they touch a model's weights."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from windlass.core.optional import is_imported, require


def is_deepspeed_zero3_enabled() -> bool:
    """Return True if models of transformers are divided while they are built, at stage 3 of DeepSpeed."""
    name = "transformers.integrations.deepspeed"  # which keeps the setting
    return is_imported(name) and bool(require(name, "ask it").is_deepspeed_zero3_enabled())


def is_fsdp_managed_module(module: nn.Module) -> bool:
    """Whether a module's parameters lie in shards on several processes."""
    return isinstance(module, FSDPModule)
