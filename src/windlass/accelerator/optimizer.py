"""A wrapper of a user's optimizer, for loops with accumulation and loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from windlass.accelerator.accumulation import AccumulationState
from windlass.core.errors import ModelError
from windlass.dist.beacon import AFTER, beacon

Update = Callable[["PreparedOptimizer", Callable[[], Any] | None], tuple[bool, Any]]


class StepGuard:
    """Refuses direct calls of an optimizer's `step`. A hook of the optimizer, so it refers to nothing.

    Attributes:
        under_way: the step is that of the prepared optimizer.
    """

    under_way = False

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self.under_way:
            name = type(optimizer).__name__
            raise ModelError(
                f"the {name} that was given to `accelerator.prepare` was stepped directly: that bypasses gradient "
                "accumulation and loss scaling. Call `step` of the optimizer that `prepare` returned"
            )


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` act only in the last micro-batch of an update.

    It is an `Optimizer`, so schedules can be built on it. Groups, state and defaults are those of the wrapped
    `optimizer`. Calling that object's `step` directly would bypass accumulation and loss scaling, and is refused.

    Args:
        accumulation: shows if the current micro-batch completes an update.
        update: applies an update with a closure or None. Return if it was applied, and the closure's result.

    Attributes:
        optimizer: the user's optimizer.
        step_was_skipped: True if the last update was skipped because fp16 gradients overflowed.
        updates: number of updates that were applied since it was prepared.

    A copy (`copy`, `pickle`) belongs to no accelerator: its `step` is that of its own copy of the wrapped optimizer.
    """

    _is_accelerate_prepared = True  # scripts look for it

    def __init__(
        self, optimizer: torch.optim.Optimizer, accumulation: AccumulationState, update: Update
    ) -> None:
        # The base class's constructor is not called: it would create groups and a state of its own.
        self.optimizer = optimizer
        self.step_was_skipped = False
        self.updates = 0
        self._accumulation, self._update = accumulation, update
        self._guard = StepGuard()
        self._registered = optimizer.register_step_pre_hook(self._guard)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet while a copy is made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "accumulation": self._accumulation,  # copies of a loop's objects share one
            "step_was_skipped": self.step_was_skipped,
            "updates": self.updates,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        PreparedOptimizer.__init__(self, state["optimizer"], state["accumulation"], _step_alone)
        self.step_was_skipped, self.updates = state["step_was_skipped"], state["updates"]

    def __copy__(self) -> PreparedOptimizer:
        inner = copy.copy(self.optimizer)  # the same groups and state, without the check of this one
        return PreparedOptimizer(inner, copy.copy(self._accumulation), _step_alone)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    # --- the user's optimizer -----------------------------------------------------------------------------------------

    # The base class annotates these as attributes, and assigns to them.

    @property
    def state(self) -> Any:
        """Parameter -> its state, as of the user's optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The groups of the user's optimizer: the same dicts."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> Any:
        """The options of groups that do not set them."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer; `param_group` has "params" and options, as for torch's optimizers."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The groups and states of the optimizer. Raises ModelError if DeepSpeed's third stage has taken the parameters
        of all groups, so states have no numbers.
        """
        if self.state and not any(group["params"] for group in self.param_groups):
            raise ModelError(
                "DeepSpeed's third stage keeps the parameters of this optimizer, so it has no state of its own: save "
                "and load it with `accelerator.save_state` and `load_state`"
            )
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` that has as many groups and parameters."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch the mode of optimizers that have two (schedule-free ones)."""
        self._switch_to("train")

    def eval(self) -> None:
        """Switch the mode of optimizers that have two (schedule-free ones)."""
        self._switch_to("eval")

    def _switch_to(self, mode: str) -> None:
        if callable(switch := getattr(self.optimizer, mode, None)):
            switch()

    # --- updates ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the update if the current micro-batch completes one; otherwise do nothing. Raises ModelError for a
        closure with fp16, whose overflows are known only after the gradients.

        Returns:
            The result of `closure`, or None.
        """
        if not self._accumulation.sync_gradients:
            return None
        self._guard.under_way = True
        beacon().call("update")
        try:
            applied, value = self._update(self, closure)
        finally:
            self._guard.under_way = False
        self.step_was_skipped = not applied
        self.updates += applied
        beacon().call(f"{AFTER}update", self.updates)
        return value

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the current micro-batch completes an update. `set_to_none=False` fills them with zeros
        instead of freeing them; None is True.
        """
        if self._accumulation.sync_gradients:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)

    def release(self) -> None:
        """Belong to no accelerator from now on, as a copy does; the wrapped optimizer's `step` may be called."""
        self._update = _step_alone
        self._registered.remove()

    @property
    def is_free(self) -> bool:
        """It belongs to no accelerator."""
        return self._update is _step_alone


def _step_alone(optimizer: PreparedOptimizer, closure: Callable[[], Any] | None) -> tuple[bool, Any]:
    """The update of an optimizer without an accelerator."""
    return True, optimizer.optimizer.step(closure)
