"""Metric values of any type as plain data: what the history, checkpoints, `metrics.jsonl` and trackers can hold.

Numbers of every library become Python's own int, float or bool; arrays and tensors become (lists of) numbers. Mappings
become dicts, sequences and sets lists. Anything else becomes text, and one warning names the metric.

Needs neither torch nor NumPy: arrays are known by their methods.
"""

from __future__ import annotations

import decimal
import enum
import math
import numbers
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.world import world_from_environment

logger = get_logger(__name__)

_MAX_DEPTH = 32
_MAX_BITS = 1023  # of an int: a larger one fits no float, which charts and trackers need
_MAX_TEXT = 1000  # characters of a value that is described
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Unknown = Callable[[Any], Any]


def plain_metrics(values: Mapping[Any, Any], source: str = "") -> dict[str, Any]:
    """`values` with text as names and plain data as values; see the module's first lines. `source`: the function that
    returned them, for the warning about a value that is not a number.
    """
    return {_name(name): plain_value(value, str(name), source) for name, value in values.items()}


def plain_value(value: Any, name: str, source: str = "") -> Any:
    """`value` as plain data. If a part of it has to become text, one warning says so of the metric `name`."""
    described: list[str] = []

    def describe(part: Any) -> str:
        described.append(type(part).__name__)
        return _text(part)

    result = _converted(value, describe, 0)
    if described and world_from_environment().is_main:
        origin = f", returned by {source}," if source else ""
        warn_once(
            logger,
            f"the metric {name!r}{origin} holds a value of type {described[0]}, which is not a number: it is logged "
            "as text. Convert it to a number to have it in charts and comparisons",
        )
    return result


def python_number(value: Any) -> Any:
    """`value` as plain data, as far as it holds numbers; parts of other types stay as they are, for a tracker that
    may know them.
    """
    return _converted(value, lambda part: part, 0)


def number_in(metrics: Mapping[str, Any], key: str, name: str) -> float:
    """The metric `key` as a float. Raises ConfigError if it is not a number.

    Args:
        name: what `metric_for_best_model` says, for the error.
    """
    value = python_number(metrics[key])
    try:
        if isinstance(value, bool | int | float):
            return float(value)
    except OverflowError:  # an int beyond the range of a float
        pass
    shown = _text(metrics[key])[:80]
    kind = type(metrics[key]).__name__
    fix = (
        f"the evaluation returns {key} = {shown} ({kind}), which is not a number; return a number from compute_metrics "
        "(NaN if there is none), or choose another metric"
    )
    raise ConfigError(Problem("metric_for_best_model", name, fix))


def _converted(value: Any, unknown: Unknown, depth: int) -> Any:
    kind = type(value)
    if kind is float or kind is bool or value is None:
        return value
    if isinstance(value, str):  # a subclass becomes the text itself
        return _encodable(str.__str__(value))
    if isinstance(value, numbers.Real | decimal.Decimal):
        return _number(value, unknown)
    if depth > _MAX_DEPTH:
        return unknown(value)
    if isinstance(value, Mapping):
        return _map(value, unknown, depth)
    if isinstance(value, list | tuple):
        return [_converted(part, unknown, depth + 1) for part in value]
    if isinstance(value, Set):  # in an order that does not depend on the process
        return sorted((_converted(part, unknown, depth + 1) for part in value), key=repr)
    return _object(value, unknown, depth)


def _number(value: Any, unknown: Unknown) -> Any:
    """A Python int or float, unless neither can hold it."""
    try:
        if isinstance(value, numbers.Integral):
            return int(value) if int(value).bit_length() <= _MAX_BITS else unknown(value)
        number = float(value)
    except (ValueError, OverflowError, TypeError):  # a signalling NaN, or a fraction beyond a float's range
        return unknown(value)
    finite = not isinstance(value, decimal.Decimal) or value.is_finite()
    return unknown(value) if finite and math.isinf(number) and value not in (math.inf, -math.inf) else number


def _map(value: Mapping[Any, Any], unknown: Unknown, depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, part in value.items():
        name = _name(key)
        result[repr(key) if name in result else name] = _converted(part, unknown, depth + 1)
    return result


def _object(value: Any, unknown: Unknown, depth: int) -> Any:
    if isinstance(value, type):
        return unknown(value)
    if callable(getattr(value, "tolist", None)) and hasattr(value, "shape"):
        return _array(value, unknown, depth)
    if isinstance(value, enum.Enum | numbers.Complex) or not hasattr(value, "__float__"):
        return unknown(value)
    try:
        return float(value)
    except Exception:
        return unknown(value)


def _array(value: Any, unknown: Unknown, depth: int) -> Any:
    """The numbers of an array or a tensor; of one with a single element, that element."""
    try:
        if getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M"):
            return unknown(value)  # dates, which NumPy lists as counts of nanoseconds
        if callable(getattr(value, "full_tensor", None)):
            value = value.full_tensor()  # spread over ranks: collective
        if getattr(value, "is_sparse", False) or getattr(value, "is_quantized", False):
            value = value.dequantize() if value.is_quantized else value.to_dense()
        listed = value.tolist()
        single = math.prod(value.shape) == 1
    except Exception:  # without values (the meta device), or of an array library with other rules
        return unknown(value)
    while single and isinstance(listed, list) and listed:
        listed = listed[0]
    return unknown(value) if type(listed) is type(value) else _converted(listed, unknown, depth + 1)


def _name(key: Any) -> str:
    return _encodable(str.__str__(key) if isinstance(key, str) else _text(key))


def _text(value: Any) -> str:
    """A description that is the same in every process: without memory addresses."""
    if isinstance(value, int):
        return f"an int of {int(value).bit_length():,} bits" if abs(value) >> _MAX_BITS else str(value)
    try:
        text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return _encodable(_ADDRESS.sub("", text)[:_MAX_TEXT])


def _encodable(text: str) -> str:
    """Without lone surrogates, which no file or terminal takes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
