"""`SyncRefModelCallback`: moves a reference model towards the trained one (TR-DPO, arXiv:2404.09656)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.errors import ModelError
from windlass.core.events import TrainerState


class SyncRefModelCallback(TrainerCallback):
    """After every `ref_model_sync_steps` updates the reference becomes `alpha * model + (1 - alpha) * reference`, with
    `ref_model_mixup_alpha`.

    Args:
        ref_model: the reference, which is divided over ranks as the model is.
        accelerator: unwraps the model.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Any) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    def on_step_end(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **kwargs: Any
    ) -> None:
        steps, alpha = getattr(args, "ref_model_sync_steps", 512), getattr(args, "ref_model_mixup_alpha", 0.6)
        if state.global_step % steps == 0:
            move_towards(
                self.accelerator.unwrap_model(self.ref_model), self.accelerator.unwrap_model(model), alpha
            )


@torch.no_grad()
def move_towards(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """Mix a share `alpha` of the parameters of `model` into those of `reference`.

    Raises:
        ModelError: they are divided over ranks in different ways.
    """
    for own, other in zip(reference.parameters(), model.parameters(), strict=True):
        if own.shape != other.shape or type(own.data) is not type(other.data):
            raise ModelError(
                "sync_ref_model=True: the reference is not divided over ranks as the model is, so it cannot be moved; "
                "train without it, or without sharding"
            )
        own.data.mul_(1.0 - alpha).add_(other.data.to(own.dtype), alpha=alpha)
