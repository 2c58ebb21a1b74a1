"""Forwards that leave no trace in a model: what measurements on a batch run in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.core.rng import preserved_rng
from windlass.transforms.buffers import ForwardState

_INTERNAL = frozenset(vars(nn.Module()))
_COPIED = (list, dict, set)


class undisturbed:  # noqa: N801 (a context manager, used like a function)
    """Leave a module as it was found, and compute no gradients: `with undisturbed(module, device): ...`.

    Restored are submodules, their modes, buffers (also those that a forward replaced), extra states and attributes
    (also the contents of lists, dicts and sets in them, such as caches), and the random generators.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._rng, self._no_grad = module, preserved_rng(device), torch.no_grad()

    def __enter__(self) -> None:
        self._rng.__enter__()
        self._saved = [
            (part, _attributes(part), dict(part._buffers), dict(part._modules))
            for part in self._module.modules()
        ]
        self._forward = ForwardState(self._module)
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        for part, attributes, buffers, children in self._saved:
            for live, saved in ((part._buffers, buffers), (part._modules, children)):
                live.clear()
                live.update(saved)  # type: ignore[arg-type]
            _restore(vars(part), attributes)
        self._forward.restore()
        self._rng.__exit__(*error)


def _attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name -> the value, and a copy of its contents if it is a container."""
    return {
        name: (value, value.copy() if type(value) in _COPIED else None)
        for name, value in vars(part).items()
        if name not in _INTERNAL or name == "training"
    }


def _restore(found: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in found.keys() - saved.keys() - _INTERNAL:
        del found[name]
    for name, (value, contents) in saved.items():
        found[name] = value
        if type(value) is list:
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)
