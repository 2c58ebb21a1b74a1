"""The stack of layers of a model, of which few are run: each further one adds the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

# A stack is run with at least so many layers: the first, the last, and two between them of which one is beside neither
# where weights are gathered for the next layer already.
_LEAST = 4


class Stack:
    """The largest list of layers in a model.

    Attributes:
        name: of the list in the model.
        length: layers that the model has.
        few, more: two numbers of layers; `more` has one whole `period` of kinds more than `few`.
    """

    def __init__(self, name: str, layers: nn.ModuleList, few: int, period: int) -> None:
        self.name, self.length = name, len(layers)
        self.few, self.more, self.period = few, few + period, period
        self._layers, self._shown = layers, len(layers)

    def cut(self, layers: int) -> None:
        """Leave the first `layers` of the stack in the model."""
        del self._layers[layers:]
        self._shown = layers

    def part(self, module: str) -> str:
        """The part of the stack that a module is in."""
        if not module.startswith(f"{self.name}."):
            return ""
        number = int(module[len(self.name) + 1 :].partition(".")[0])
        if number == 0:
            return "first"
        return "last" if number == self._shown - 1 else "middle"


def find_stack(model: nn.Module) -> Stack | None:
    """The stack whose layers are left out; None if the model has none that is long enough, or its layers repeat in no
    regular way.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    sized = [(sum(p.numel() for p in module.parameters()), name, module) for name, module in lists]
    outer = [item for item in sized if not any(item[1].startswith(f"{other[1]}.") for other in sized)]
    if not outer:
        return None
    # By size: the layers of a small tower beside the decoder are all run.
    _, name, layers = max(outer, key=lambda item: item[0])
    kinds = _kinds(layers, getattr(model, "config", None))
    for period in range(1, len(kinds) // 2):
        few = _few(kinds, period)
        if few is not None and few + period < len(kinds):
            return Stack(name, layers, few, period)
    return None


def _few(kinds: Sequence[Any], period: int) -> int | None:
    """The least number of layers that ends as the whole stack does, and from which on kinds repeat with `period`."""
    length = len(kinds)
    for few in range(max(_LEAST, period), length - period + 1):
        if (
            (length - few) % period == 0
            and all(kinds[index] == kinds[index - period] for index in range(few, length))
            and all(kinds[index] == kinds[index - period] for index in range(max(few - period, period), few))
        ):
            return few
    return None


def _kinds(layers: nn.ModuleList, config: Any) -> list[Any]:
    """What each layer is: its class, the shapes of its weights, and its type in the configuration."""
    text = getattr(config, "text_config", None) or config
    types = getattr(text, "layer_types", None) or ()
    return [
        (
            type(layer).__qualname__,
            tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in layer.named_parameters()),
            types[number] if number < len(types) else None,
        )
        for number, layer in enumerate(layers)
    ]
