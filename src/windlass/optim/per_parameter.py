"""The base of optimizers that update one parameter at a time, so that a backward can apply each update."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.core.errors import ModelError
from windlass.dist.sharded import is_sharded, local, part

_LOW = (torch.float16, torch.bfloat16)


class CopiedOptimizer(torch.optim.Optimizer):
    """An optimizer that is copied and pickled with its own attributes: PyTorch keeps the groups and their state alone.

    Attributes:
        copied: the names of those attributes.
    """

    copied: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.copied}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Each value keeps its dtype: PyTorch casts them to that of their parameter,
        which for averages in fp32 of a weight in bf16 would drop half of their bits.
        """
        super().load_state_dict(state_dict)
        saved, live = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for number, parameter in zip(saved, live, strict=True):
            state = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != state[name].dtype:
                    state[name] = value.to(parameter.device)


class PerParameterOptimizer(CopiedOptimizer):
    """An optimizer whose update of a parameter depends on nothing but that parameter, its gradient and its state.

    Attributes:
        in_backward: each update is applied in the backward, once the gradient is complete, which is freed then
            (`engine/fused.py`). `step` does it for all parameters that have a gradient.
        projects: it projects the gradients of chosen weights, which are its groups with `projected`.

    Half-precision parameters are updated in fp32 and rounded once.
    """

    projects = False
    copied = ("in_backward",)

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.in_backward: bool = defaults.pop("in_backward", False)
        super().__init__(params, defaults)
        refuse_complex(self)

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        """Return True if every rank has all of the state of the parameters of `group`, also if they are sharded."""
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `closure`, if given, recomputes and returns the loss."""
        loss = called(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)
        return loss

    @torch.no_grad()
    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one `parameter` of `group` by its gradient. Collective if it is sharded."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            name = type(self).__name__
            raise RuntimeError(f"{name} cannot use sparse gradients; build the embedding with sparse=False")
        grad = grad.float() if grad.dtype in _LOW else grad
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        self.apply(parameter, grad, state, group)

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `parameter` and its `state`, whose "step" counts this update already. `grad` has the parameter's
        shape, sharded as it is, in fp32 or fp64. `group` has the options, such as "lr".
        """
        raise NotImplementedError


def refuse_complex(optimizer: torch.optim.Optimizer) -> None:
    """Raise ModelError if a parameter of `optimizer`, which computes with real numbers, is complex."""
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            f"{type(optimizer).__name__} cannot update complex parameters; use optim='adamw_torch'"
        )


# `step` runs under `no_grad`, and closures call `backward`.
@torch.enable_grad()
def called(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of an optimizer's `step` computes; None without one."""
    return None if closure is None else closure()


def updates_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, PerParameterOptimizer) and optimizer.in_backward


def move(parameter: Tensor, displacement: Tensor, decay: float | Tensor = 0.0) -> None:
    """`parameter -= decay * parameter + displacement`, in place. `displacement` has the parameter's shape, sharded as
    it is or whole, in fp32 or fp64.
    """
    mine = local(parameter)
    change = (
        part(parameter).of(displacement)
        if is_sharded(parameter) and not is_sharded(displacement)
        else local(displacement)
    )
    if mine.dtype in _LOW:
        # Decay and displacement are both applied before the one rounding: rounding twice would lose small ones
        # twice.
        wide = mine.float()
        mine.copy_(wide.sub_(wide * decay).sub_(change))
        return
    # The truth of a tensor would be read from the device.
    if isinstance(decay, Tensor) or decay:
        mine.mul_(1 - decay)
    mine.sub_(change)
