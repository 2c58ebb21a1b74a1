"""Ranges of the options of optimizers, by name: the same option means the same in each that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Options that constructors take in any size, and what is wrong with a value in the first update, or in all of them.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("beta1", "beta2", "beta3"), (lambda v: 0 <= v < 1, "must be at least 0 and below 1")),
    **dict.fromkeys(("t_alpha", "t_beta3", "block_size"), (lambda v: v >= 1, "must be at least 1")),
    **dict.fromkeys(("clip_threshold", "max_lr"), (lambda v: v > 0, "must be above 0")),
    "decay_rate": (lambda v: v <= 0, "must be at most 0, as the power of a number of updates"),
    "gamma": (lambda v: 0 <= v <= 1, "must be between 0 and 1"),
    "ns_steps": (lambda v: 1 <= v < 100, "must be at least 1 and below 100"),
    "weight_lr_power": (lambda v: v >= 0, "must be at least 0, as the rate may be 0 in a warm-up"),
}


def has_range(name: str) -> bool:
    """Return True if the option of this name is a number of a known range."""
    return name in _RANGES


def outside_range(name: str, value: Any) -> str:
    """What is wrong with a number for the option of this name; empty if nothing is."""
    fits, fix = _RANGES.get(name, (lambda _: True, ""))
    return "" if fits(value) else fix
