"""Moving a model to its device."""

from __future__ import annotations

import torch
from torch import nn


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`, in place. Parameters stay the same objects, so ties and optimizers stay valid."""
    if device.type != "xla":
        model.to(device)
        return
    # Tensors of this device are of another kind, so PyTorch would make new parameters, one for each name of a tied one.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
