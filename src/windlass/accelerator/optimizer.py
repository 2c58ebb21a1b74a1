"""A thin wrapper of a user's optimizer, for loops with accumulation and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.dist.beacon import AFTER, beacon


class Stepper(Protocol):
    """The part of an accelerator that a prepared optimizer calls."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its update."""
        ...

    def apply_update(
        self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None
    ) -> tuple[bool, Any]:
        """Update with `optimizer.optimizer`. Return whether the update was applied, and the result of the closure."""
        ...


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` act only in the last micro-batch of an update.

    It is an `Optimizer`, so schedules can be built on it. Groups, state and defaults are those of the wrapped
    `optimizer`. Calling that object's `step` directly would bypass accumulation and loss scaling, and is refused.

    Attributes:
        optimizer: the user's own.
        step_was_skipped: whether the last update was skipped because fp16 gradients overflowed.
        updates: number of updates applied since it was prepared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
        # The base class's constructor is not called: it would create groups and a state of its own.
        self.optimizer = optimizer
        self.step_was_skipped = False
        self.updates = 0
        self._stepper = stepper
        self._under_way = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_raw_step)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def _refuse_raw_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._under_way:
            name = type(optimizer).__name__
            raise ModelError(
                f"the {name} that was given to `accelerator.prepare` was stepped directly: that goes past gradient "
                "accumulation and loss scaling. Call `step` of the optimizer that `prepare` returned"
            )

    # --- the user's own object ----------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch the mode of optimizers that have two (schedule-free ones)."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """For optimizers that have two modes (schedule-free ones)."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    # --- updates ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the update if the current micro-batch completes one; else do nothing.

        Returns:
            The result of `closure`, or None.

        Raises:
            ModelError: a closure together with fp16, whose overflows are known only after the gradients.
        """
        if not self._stepper.sync_gradients:
            return None
        self._under_way = True
        beacon().call("update")
        try:
            applied, value = self._stepper.apply_update(self, closure)
        finally:
            self._under_way = False
        self.step_was_skipped = not applied
        self.updates += applied
        beacon().step(self.updates)
        beacon().call(f"{AFTER}update")
        return value

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the current micro-batch completes an update; else keep accumulating."""
        if self._stepper.sync_gradients:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)

    def let_go(self) -> None:
        """Allow direct calls of the wrapped optimizer's `step` again."""
        self._guard.remove()
