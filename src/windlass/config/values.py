"""Checks of one value at a time: its type, its range, its choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from windlass.config.nearest import did_you_mean
from windlass.config.normalise import members
from windlass.config.parallel.rows_training import COMPILE_MODES


@dataclass(frozen=True, slots=True)
class Range:
    holds: Callable[[Any], bool]
    words: str


def at_least(low: float, hint: str = "") -> Range:
    return Range(lambda v: low <= v < math.inf, f"must be at least {low}{hint}")


def between(low: float, high: float) -> Range:
    """The half-open interval [low, high)."""
    return Range(lambda v: low <= v < high, f"must be at least {low} and below {high}")


_STRIDE = Range(
    lambda v: v == 0 or 0 < v < 1 or (v >= 1 and v < math.inf and v == int(v)),
    "must be a whole number of updates, or a share of all updates between 0 and 1",
)
_FINITE = Range(math.isfinite, "must be a finite number")
_POSITIVE = Range(lambda v: 0 < v < math.inf, "must be above 0")

RANGES: dict[str, Range] = {
    "per_device_train_batch_size": at_least(1),
    "per_device_eval_batch_size": at_least(1),
    "num_train_epochs": _FINITE,
    "max_steps": at_least(-1, "; -1 leaves the length to num_train_epochs"),
    "learning_rate": at_least(0),
    "warmup_steps": _STRIDE,
    "weight_decay": at_least(0),
    "adam_beta1": between(0, 1),
    "adam_beta2": between(0, 1),
    "adam_epsilon": at_least(0),
    "gradient_accumulation_steps": at_least(1),
    "max_grad_norm": Range(lambda v: v >= 0, "must be at least 0; 0 switches clipping off"),
    "label_smoothing_factor": between(0, 1),
    "torch_empty_cache_steps": at_least(1),
    "logging_steps": _STRIDE,
    "eval_steps": _STRIDE,
    "save_steps": _STRIDE,
    "eval_delay": at_least(0),
    "keep_last": at_least(1),
    "keep_best": at_least(1),
    "eval_accumulation_steps": at_least(1),
    "dataloader_num_workers": at_least(0),
    "dataloader_prefetch_factor": at_least(1),
    "dataloader_start_timeout": _POSITIVE,
    "ddp_bucket_cap_mb": at_least(1),
    "ddp_timeout": _POSITIVE,
    "seed": at_least(0),
    "data_seed": at_least(0),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "include_for_metrics": ("inputs", "loss"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "torch_compile_mode": COMPILE_MODES,
}

_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
}


def type_fault(value: Any, hint: Any) -> str | None:
    """Why `value` is not of type `hint`; None when it is."""
    kinds = members(hint)
    if any(_is_a(value, kind) for kind in kinds):
        return _enum_fault(value, kinds)
    return f"must be {_describe(kinds)}, and is {type(value).__name__}"


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is_item(item, get_args(kind)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_item(value: Any, kind: Any) -> bool:
    # A word that is no member of an enum is reported as a wrong choice, which says more than a wrong type.
    return isinstance(value, str) if isinstance(kind, type) and issubclass(kind, Enum) else _is_a(value, kind)


def _enum_fault(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """A word is text and so passes as `Choice | str`; it must still be one of the words."""
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    for item in get_args(next((k for k in kinds if get_origin(k) is list), None)):
        if isinstance(value, list) and isinstance(item, type) and issubclass(item, Enum):
            return next((fault for v in value if (fault := choice_fault(v, [m.value for m in item]))), None)
    return choice_fault(value, [m.value for m in enums[0]]) if enums else None


def choice_fault(value: Any, choices: Any) -> str | None:
    """Why `value` (or an item of it) is not among `choices`; None when it is."""
    for item in value if isinstance(value, list) else [value]:
        if item not in choices:
            return (
                f"must be one of {', '.join(map(str, choices))}{did_you_mean(str(item), map(str, choices))}"
            )
    return None


def _describe(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        if kind in _TYPE_WORDS:
            words.append(_TYPE_WORDS[kind])
        elif get_origin(kind) in (list, dict):
            words.append("a list" if get_origin(kind) is list else "a dict")
        elif isinstance(kind, type) and issubclass(kind, Enum):
            words.append("one of " + ", ".join(str(m.value) for m in kind))
    return " or ".join(dict.fromkeys(words))


def options_from(text: str) -> dict[str, str]:
    """`"rank=64, scale=0.10"` as {"rank": "64", "scale": "0.10"}.

    Raises:
        ValueError: a part is not `key=value`.
    """
    options = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"must be 'key=value, key=value'; {part!r} is not such a pair")
        options[key.strip()] = value.strip()
    return options
