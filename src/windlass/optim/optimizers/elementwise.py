"""The base of optimizers whose update of an element depends on that element alone, and on sums over its tensor.

They work on lists of tensors (`torch._foreach_*`) and on this rank's part of sharded parameters. No host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.core.errors import ModelError
from windlass.dist.sharded import locals_of, sum_of_parts
from windlass.optim.per_parameter import CopiedOptimizer, called

State = dict[str, Any]


class Batch:
    """The parameters of one group that have gradients, with their gradients and states; sharded ones as this rank's
    parts, complex ones as pairs of real numbers.

    Attributes:
        parameters: as the group has them.
        weights, gradients: tensors of equal shapes.
        states: the state of each parameter, as `start_state` returned it first.
        positions: the index of each parameter in its group.
    """

    def __init__(self, group: Mapping[str, Any], states: Mapping[Tensor, State]) -> None:
        chosen = [(i, p) for i, p in enumerate(group["params"]) if p.grad is not None]
        self.positions = [i for i, _ in chosen]
        self.parameters: list[Tensor] = [p for _, p in chosen]
        self.weights = _real(locals_of(self.parameters))
        self.gradients = _real(locals_of([p.grad for p in self.parameters if p.grad is not None]))
        self.states = [states[p] for p in self.parameters]

    def column(self, name: str) -> list[Tensor]:
        return _real(locals_of([state[name] for state in self.states]))

    def advance(self) -> list[int]:
        """Add 1 to `step` of each state; return the new values."""
        for state in self.states:
            state["step"] += 1
        return [state["step"] for state in self.states]

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each of `values` over the whole parameter, as scalars. Collective if parameters are sharded."""
        return sum_of_parts([value.sum() for value in values], self.parameters)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    # As in torch's optimizers: the square of a complex gradient would be no second moment of it.
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


class ElementwiseOptimizer(CopiedOptimizer):
    """Subclasses define `start_state` and `update`. Raises ValueError if an option is outside its range."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_ranges(group)

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        """The state of a parameter before its first update. Loading a checkpoint calls it too."""
        raise NotImplementedError

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """Apply one update to the weights of `batch`, in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `closure`, if given, recomputes and returns the loss."""
        loss = called(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    if parameter.grad.is_sparse:
                        raise ModelError(
                            f"{type(self).__name__} cannot use sparse gradients; build the embedding with sparse=False"
                        )
                    self.state[parameter].update(self.start_state(parameter, group))
            self.update_group(Batch(group, self.state), group)
        return loss

    def update_group(self, batch: Batch, group: dict[str, Any]) -> None:
        """Apply one update to a group with gradients: torch's functions of lists refuse empty ones."""
        if batch.parameters:
            self.update(batch, group)


def zeros(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of the parameter's shape, sharded and complex as it is."""
    if dtype is not None and parameter.is_complex():
        dtype = dtype.to_complex()
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def check_ranges(group: Mapping[str, Any]) -> None:
    """Check the options that most optimizers have. Raises ValueError with the option and its value."""
    for name in ("lr", "eps", "weight_decay"):
        # Not `< 0`: NaN is refused too.
        if name in group and not group[name] >= 0:
            raise ValueError(f"{name}={group[name]} must be at least 0")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise ValueError(f"betas={group['betas']} must be at least 0 and below 1")


def decay_(weights: list[Tensor], rate: float) -> None:
    """Multiply the weights by `1 - rate` (decoupled weight decay: rate is learning rate times decay)."""
    if rate != 0:
        torch._foreach_mul_(weights, 1 - rate)


def average_(averages: list[Tensor], values: list[Tensor], beta: float) -> None:
    """`average = beta * average + (1 - beta) * value`."""
    torch._foreach_mul_(averages, beta)
    torch._foreach_add_(averages, values, alpha=1 - beta)


def average_squares_(averages: list[Tensor], values: list[Tensor], beta: float) -> None:
    """`average = beta * average + (1 - beta) * value ** 2`."""
    torch._foreach_mul_(averages, beta)
    torch._foreach_addcmul_(averages, values, values, value=1 - beta)
