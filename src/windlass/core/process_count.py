"""The number of processes as a script's loss sees it: a number that notes if the loss is computed with it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any


class CountUse:
    """What one call of a script's loss did with the number of processes.

    Attributes:
        used: a tensor with a gradient was multiplied or divided by it, or by a number that was computed from it.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False


_watch: CountUse | None = None
_SCALING = frozenset({"mul", "multiply", "div", "divide", "true_divide"})


@contextlib.contextmanager
def watched_process_count(use: CountUse) -> Iterator[None]:
    """Context in which `process_count` notes in `use` what is computed with it."""
    global _watch
    earlier, _watch = _watch, use
    try:
        yield
    except TypeError as error:
        # In `torch.zeros(num_processes, 3)` PyTorch takes the watched number for the whole size.
        error.add_note(
            "The number of processes is watched here: as one of several sizes give int(num_processes)."
        )
        raise
    finally:
        _watch = earlier


def process_count(number: int) -> int:
    """`number`, which is watched within `watched_process_count`."""
    return number if _watch is None else _WatchedInt(number)


class _Watched:
    """Dispatched by PyTorch, as a tensor subclass is: its operations are called with the plain number instead."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})
        scales = getattr(func, "__name__", "").rstrip("_") in _SCALING  # as `mul_` does
        if _watch is not None and scales and getattr(result, "requires_grad", False):
            _watch.used = True
        return result


class _WatchedInt(_Watched, int):
    """Also a result of its arithmetic: `num_processes // tp_size`."""


class _WatchedFloat(_Watched, float):
    """`1 / num_processes`."""


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):  # sizes
        return type(value)(map(_plain, value))
    if isinstance(value, _WatchedInt):
        return int(value)
    return float(value) if isinstance(value, _WatchedFloat) else value


def _watched(value: Any) -> Any:
    return _WatchedInt(value) if isinstance(value, int) else _WatchedFloat(value)


def _arithmetic(operation: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented  # a tensor's own operator comes next
        pair = (_plain(other), _plain(self)) if reflected else (_plain(self), _plain(other))
        return _watched(operation(*pair))

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow"):
    for _class in (_WatchedInt, _WatchedFloat):
        setattr(_class, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
        setattr(_class, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
