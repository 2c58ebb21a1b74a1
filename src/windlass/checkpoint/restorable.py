"""Tests before training that the state of a model can be saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from windlass.checkpoint.codec import decode, encode
from windlass.checkpoint.names import shorten
from windlass.checkpoint.own_loading import fill_values, hand_over
from windlass.checkpoint.tensor_file import check_tensor
from windlass.checkpoint.weights import stored_state
from windlass.core.errors import CheckpointError
from windlass.core.module_state import bare, customizes_state, extra_states, on_device_of, state_of
from windlass.core.tensors import bits_of, same_bits
from windlass.dist.sharded import local

_WHAT = Path("the model's own state")


def check_restorable(model: nn.Module) -> None:
    """Check that the state of the model can be saved and loaded. Parameters have the same bits afterwards.

    The state of a model that customizes its state dict is copied, and loaded while its trained parameters have other
    values. Extra states are loaded as well. Other models are only inspected.
    """
    module = bare(model)
    stored, _ = stored_state(state_of(module))
    for name, tensor in stored.items():
        check_tensor(local(tensor), f"model state {name!r}")
    if customizes_state(module):
        _check_own_loading(module)
        return
    extra = extra_states(module)
    fill_values(_WHAT, module, {name: _copied(value) for name, value in extra.items()})


def _check_own_loading(module: nn.Module) -> None:
    trained = {name: local(p).detach() for name, p in module.named_parameters() if p.requires_grad}
    before = {name: tensor.clone() for name, tensor in trained.items()}
    state = {name: _copied(value) for name, value in state_of(module).items()}
    try:
        for tensor in trained.values():
            # Another value in every element.
            tensor.copy_(bits_of(tensor).bitwise_not().view(tensor.dtype).view(tensor.shape))
        hand_over(_WHAT, module, state)
        lost = [name for name, tensor in trained.items() if not same_bits(tensor, before[name])]
    finally:
        for name, tensor in trained.items():
            tensor.copy_(before[name])
    if lost:
        raise CheckpointError(
            f"state_dict() and load_state_dict() of {type(module).__name__} do not restore {len(lost)} parameters "
            f"that are trained: {shorten(lost)}. A run could not be continued from its checkpoints: put them into the "
            "state dict and load them, or freeze them"
        )


def _copied(value: Any) -> Any:
    """A value after saving and loading, on the same device."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    tree, tensors = encode(value)
    return on_device_of(
        value, decode(tree, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
    )
