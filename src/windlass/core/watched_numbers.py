"""Numbers of a run as a script's loss sees them: numbers that note if the loss is computed with them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any


class NumberUse:
    """What one call of a script's loss did with the numbers of processes and of micro-batches.

    Attributes:
        processes: a tensor with a gradient was multiplied or divided by the number of processes, or by a number that
            was computed from it.
    """

    __slots__ = ("_before", "_divisor", "_quotient", "_was_returned", "processes")

    def __init__(self) -> None:
        self.processes = self._was_returned = False
        self._quotient: Any = None
        # Of the quotient: since `compute_loss` returned it, and before
        self._divisor = self._before = 1

    def divided(self, dividend: Any, quotient: Any, micro_batches: int) -> None:
        """Note that a tensor was divided by the number of micro-batches itself."""
        if dividend is not self._quotient:
            self._divisor = self._before = 1
        self._divisor *= micro_batches
        self._quotient = quotient

    def returned(self, loss: Any) -> None:
        """Note what `compute_loss` returned: what follows is done by the training step."""
        self._before = self._divisor if loss is self._quotient else 1
        self._quotient, self._divisor, self._was_returned = loss, 1, True

    def divisor(self, loss: Any, by_step: bool = False) -> int | None:
        """What `loss` as a whole was divided by, or what the step divided it by; None if that was not seen."""
        if loss is not self._quotient or (by_step and not self._was_returned):
            return None
        return self._divisor if by_step else self._divisor * self._before


_watch: NumberUse | None = None
_DIVISIONS = frozenset({"div", "div_", "divide", "divide_", "true_divide", "true_divide_"})
_SCALING = _DIVISIONS | {"mul", "mul_", "multiply", "multiply_"}


@contextlib.contextmanager
def watched_numbers(use: NumberUse) -> Iterator[None]:
    """Context in which `process_count` and `micro_batch_count` note in `use` what is computed with them."""
    global _watch
    earlier, _watch = _watch, use
    try:
        yield
    except TypeError as error:
        # In `torch.zeros(num_processes, 3)` PyTorch takes the watched number for the whole size.
        error.add_note(
            "The numbers of processes and of micro-batches are watched here: as one of several sizes give "
            "int(num_processes), int(gradient_accumulation_steps)."
        )
        raise
    finally:
        _watch = earlier


def process_count(number: int) -> int:
    """`number`, which is watched within `watched_numbers`."""
    return number if _watch is None else _Processes(number)


def micro_batch_count(number: int) -> int:
    """`number`, whose divisions are watched within `watched_numbers`."""
    return number if _watch is None else _MicroBatches(number)


class _Watched:
    """Dispatched by PyTorch, as a tensor subclass is: its operations are called with the plain number instead."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})
        name = getattr(func, "__name__", "")
        if _watch is None or name not in _SCALING:
            return result
        operands = (*args, *(kwargs or {}).values())
        if not any(type(value) is _MicroBatches for value in operands):
            _watch.processes |= getattr(result, "requires_grad", False)
        elif name in _DIVISIONS and len(operands) == 2 and result.numel() == 1:
            dividend, number = operands
            _watch.divided(dividend, result, int(number))
        return result


class _MicroBatches(_Watched, int):
    """A result of its arithmetic is a plain number."""


class _Processes(_MicroBatches):
    """Also a result of its arithmetic: `num_processes // tp_size`. Of a subclass, its operators come before those of a
    number of micro-batches.
    """


class _WatchedFloat(_Watched, float):
    """`1 / num_processes`."""


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):  # sizes
        return type(value)(map(_plain, value))
    if isinstance(value, _MicroBatches):
        return int(value)
    return float(value) if isinstance(value, _WatchedFloat) else value


def _watched(value: Any) -> Any:
    return _Processes(value) if isinstance(value, int) else _WatchedFloat(value)


def _arithmetic(operation: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented  # a tensor's own operator comes next
        pair = (_plain(other), _plain(self)) if reflected else (_plain(self), _plain(other))
        return _watched(operation(*pair))

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow"):
    for _class in (_Processes, _WatchedFloat):
        setattr(_class, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
        setattr(_class, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
