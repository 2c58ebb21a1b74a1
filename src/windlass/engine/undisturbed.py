"""A context for forwards of a measurement, which restores the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from windlass.core.rng import preserved_rng
from windlass.transforms.buffers import ForwardState

_INTERNAL = frozenset(vars(nn.Module()))
_COPIED = (list, dict, set)


@contextlib.contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute no gradients and compile nothing within the body, and restore the module afterwards.

    Restores submodules, their modes, buffers (also those that a forward replaced), extra states and attributes (also
    the contents of lists, dicts and sets in them, such as caches), and the random generators.
    """
    with preserved_rng(device):
        parts = [
            (part, _attributes(part), dict(part._buffers), dict(part._modules)) for part in module.modules()
        ]
        forward = ForwardState(module)
        try:
            with torch.no_grad(), _uncompiled():
                yield
        finally:
            for part, attributes, buffers, children in parts:
                part._buffers.clear()
                part._buffers.update(buffers)
                part._modules.clear()
                part._modules.update(children)
                _restore(vars(part), attributes)
            forward.restore()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A graph without gradients would be compiled for a forward or two, and training compiles another one."""
    compiles = "torch._dynamo" in sys.modules  # not imported for models that are not compiled
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


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
