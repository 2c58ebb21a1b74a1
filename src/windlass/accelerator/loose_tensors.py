"""Tensors that prepared optimizers update and that belong to no prepared model: latents, the weights of another one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from windlass.core.errors import CheckpointError
from windlass.core.types import State


class LooseTensors:
    """Saves and restores such tensors, in place.

    Args:
        tensors: by name, which is the place in the optimizers: "OPTIMIZER_GROUP_POSITION", counted from 0.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def module(self) -> nn.Module:
        """A module whose parameters they are, for their names in the state of optimizers."""
        return _Holder(self._tensors)

    def state_dict(self) -> State:
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def load_state_dict(self, state: State) -> None:
        shapes = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        saved = {name: list(tensor.shape) for name, tensor in state.items()}
        if shapes != saved:
            raise CheckpointError(
                f"the tensors of no model in the checkpoint are {saved}, and those of the optimizers are {shapes}: "
                "build and prepare the optimizers as they were when it was saved"
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(state[name])


class _Holder(nn.Module):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        # `register_parameter` refuses tensors that are not `nn.Parameter`s.
        self._parameters.update(tensors)  # type: ignore[arg-type]
