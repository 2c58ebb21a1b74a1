"""Where in a model an operation belongs: to a module's forward, or to the backward of what that forward recorded."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# Of the model itself, outside its children: the loss, as a rule.
ROOT = ""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def pattern(name: str) -> str:
    """The name of a module with `*` for each number: the same for all layers of a stack."""
    return _NUMBER.sub("*", name)


class ModulePlaces:
    """Follows the modules that are called, and finds in a backward the module whose forward recorded the present node.

    Autograd numbers its nodes in the order in which a thread records them, so the number of a node says which module
    was running. What recomputation records in a backward is found the same way.

    Args:
        model: the bare module, whose modules have names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = [ROOT]
        # From which node number on which module was running.
        self._since: list[int] = [-1]
        self._running: list[str] = [ROOT]
        self._last = ROOT  # the module whose backward ran last

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the body, forwards are followed."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            # Also after a forward that raised: its entry must not stay on the stack.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._mark()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        # The forward of a module that was running when the body began has no entry here.
        if len(self._stack) > 1:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._since.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._running.append(self._stack[-1])

    def now(self) -> tuple[str, bool]:
        """The module of the present operation, and whether it belongs to its backward."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], False
        if len(self._stack) > 1:
            return self._stack[-1], True  # computed again in the backward
        number = node._sequence_nr()
        if number >= 1 << 63:  # of the accumulation of a gradient, which follows the node that made it
            return self._last, True
        place = self._running[bisect_right(self._since, number) - 1]
        self._last = place
        return place, True
