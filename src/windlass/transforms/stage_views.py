"""A model as one stage of a pipeline sees it: other stages' units are replaced while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from windlass.transforms.pipeline_cut import Cut, Output
from windlass.transforms.stage_balance import StageBalance


class StageEnd(BaseException):
    """Ends a forward where the stage ends. Not an `Exception`: a script's handlers must not catch it.

    Attributes:
        tensor: what the next stage begins with.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("the end of a stage")
        self.tensor = tensor


class _StandIn(nn.Module):
    """In the place of a unit, with its attributes."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.__dict__["unit"] = unit  # not registered: its parameters stay where they are

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The model around it may read what a layer says of itself, such as `layer.attention_type`.
            return getattr(self.__dict__["unit"], name)


class _First(_StandIn):
    """The unit before a stage: returns what the stage before sent."""

    def __init__(self, unit: nn.Module, output: Output) -> None:
        super().__init__(unit)
        self._output = output
        self.received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None, "a stage begins with a tensor"
        return self._output.holding(self.received)


class _Last(_StandIn):
    """The last unit of a stage: ends the forward with its result."""

    def forward(self, *args: Any, **kwargs: Any) -> Never:
        found = self.unit(*args, **kwargs)
        raise StageEnd(found[0] if isinstance(found, tuple) else found)


class _Skipped(_StandIn):
    """A unit of an earlier stage, whose result nothing of this stage uses: returns zeros of its shape and dtype, which
    the model may ask for.
    """

    def __init__(self, unit: nn.Module, output: Output) -> None:
        super().__init__(unit)
        self._output = output
        self.result_dtype = output.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        size = self._output.size
        if size is None:
            return self._output.holding(given)
        rows = given.shape if not given.is_floating_point() else given.shape[:-1]
        zero = torch.zeros((), dtype=self.result_dtype, device=given.device)
        return self._output.holding(zero.expand(*rows, size))


class StageView:
    """The units that one stage replaces while it runs.

    Args:
        stage: its number in `cut`.
        balance: of the experts in all stages.
    """

    def __init__(self, model: nn.Module, cut: Cut, stage: int, balance: StageBalance) -> None:
        self.balance = balance
        modules = dict(model.named_modules())
        self._swaps: list[tuple[nn.Module, str, nn.Module]] = []
        self._first: _First | None = None
        before = cut.last[stage - 1] if stage else None
        for name in [name for names in cut.stages[:stage] for name in names]:
            unit = modules[name]
            if name == before:
                self._first = _First(unit, cut.outputs[name])
                self._swap(modules, name, self._first)
            elif name in cut.outputs and next(unit.parameters(), None) is not None:
                self._swap(modules, name, _Skipped(unit, cut.outputs[name]))
        if stage < len(cut.last):
            self._swap(modules, cut.last[stage], _Last(modules[cut.last[stage]]))

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the dtype in which units compute, instead of that in which they did when the model was cut."""
        for _, _, stand_in in self._swaps:
            if isinstance(stand_in, _Skipped):
                stand_in.result_dtype = dtype

    def _swap(self, modules: Mapping[str, nn.Module], name: str, stand_in: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        self._swaps.append((modules[parent], child, stand_in))

    def enter(self, received: Tensor | None) -> None:
        """Replace the units; the stage begins with `received`, unless it is the first."""
        states = self.balance.begin(received)
        if self._first is not None:
            self._first.received = states
        self._exchange()

    def leave(self) -> None:
        """Restore the model."""
        self._exchange()
        if self._first is not None:
            self._first.received = None

    def _exchange(self) -> None:
        # Modules are replaced, and not hooked: the hooks of a unit that another stage computes must not run here.
        for place, (parent, name, other) in enumerate(self._swaps):
            self._swaps[place] = (parent, name, parent.get_submodule(name))
            parent.register_module(name, other)
