"""A context for forwards of a measurement, which restores the model."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.rng import preserved_rng
from windlass.transforms.buffers import ForwardState

# Engines that shard parameters exchange them within a forward, and keep what they did outside the module.
_LEFT = frozenset({"_parameters"})
_COPIED = (list, dict, set, OrderedDict)


@contextlib.contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute no gradients and compile nothing within the body, and restore the module afterwards.

    Restores submodules, their modes, hooks, buffers (also those that a forward replaced), extra states and attributes,
    what is in those that are lists, dicts, sets (such as caches) or objects (such as configurations), and the random
    generators. So the next forward is again the first one of a model that prepares itself in it: if a note of that
    were removed and its hooks kept, it would install them twice.
    """
    with preserved_rng(device):
        parts = [(part, _saved(vars(part), _inside)) for part in module.modules()]
        forward = ForwardState(module)
        try:
            with torch.no_grad(), _uncompiled():
                yield
        finally:
            for part, attributes in parts:
                _restore(vars(part), attributes)
            forward.restore()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A graph without gradients would be compiled for a forward or two, and training compiles another one."""
    compiles = "torch._dynamo" in sys.modules  # not imported for models that are not compiled
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def _contents(value: Any) -> Any:
    """A copy of a container; None of anything else."""
    return value.copy() if type(value) in _COPIED else None


def _inside(value: Any) -> Any:
    """As `_contents`; of an object its attributes, each with a copy if it is a container."""
    shared = callable(value) or isinstance(value, Tensor | ModuleType)
    # Without attributes of its own is also a proxy of an object that may be gone.
    if type(value) in _COPIED or shared or not type(value).__dictoffset__:
        return _contents(value)
    return _saved(vars(value), _contents)


class _Attributes(dict[str, tuple[Any, Any]]):
    """Name -> the value, and a copy of what is in it."""


def _saved(attributes: dict[str, Any], inside: Callable[[Any], Any]) -> _Attributes:
    kept = {name: value for name, value in attributes.items() if name not in _LEFT}
    return _Attributes({name: (value, inside(value)) for name, value in kept.items()})


def _restore(found: dict[str, Any], saved: _Attributes) -> None:
    for name in found.keys() - saved.keys() - _LEFT:
        del found[name]
    for name, (value, inside) in saved.items():
        found[name] = value
        if isinstance(inside, _Attributes):
            _restore(vars(value), inside)
        elif type(value) is list:
            value[:] = inside
        elif inside is not None:
            value.clear()
            value.update(inside)
