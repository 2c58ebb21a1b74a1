"""The records of a script's two runs: the first difference of each quantity, and what it follows from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDING = 1e-5
"""Relative difference up to which two fp32 results of the same sum, taken in another order, are called rounding."""

QUANTITIES = ("rows", "rates", "loss", "norm", "digests")
"""What is compared in each update, in the order in which a difference of one passes into the next."""


@dataclass(frozen=True)
class ScriptRecord:
    """What `recorder.py` wrote of one run."""

    # `rows`, `rates`, `loss`, `norm`, `digests`, `seconds` and `pause` of each update
    updates: list[dict[str, Any]]
    # Growth of the process's peak since the first forward, in bytes; None if there was no forward
    memory: int | None
    unread: list[str]  # arguments that the script set and the library did not read
    weights: Path  # the file of the trained parameters after the last update
    device_memory: int | None = None

    @property
    def sees_rows(self) -> bool:
        """Return False if no row was seen: the script computes with parts of its model, and not by calling it."""
        return any(rows for update in self.updates for rows in update["rows"])

    @property
    def seconds(self) -> float:
        """Fastest update after the first, which warms up: other work on the machine makes updates slower only."""
        return float(min(update["seconds"] for update in self.updates[1:] or self.updates))

    @property
    def pause(self) -> float | None:
        """Longest time between two updates: of a save, an evaluation or the log."""
        return max((update["pause"] for update in self.updates if update["pause"] is not None), default=None)


@dataclass(frozen=True)
class FirstDifference:
    """The first update, from 1, in which a quantity differs, and by how much."""

    update: int
    own: Any
    ours: Any

    @property
    def is_rounding(self) -> bool:
        """Return True if two numbers differ no more than the order of a sum explains."""
        return isinstance(self.own, float) and math.isclose(self.own, self.ours, rel_tol=ROUNDING)


def differences(own: ScriptRecord, ours: ScriptRecord) -> dict[str, FirstDifference]:
    """Return the first difference of each quantity that has one."""
    found: dict[str, FirstDifference] = {}
    for number, (one, other) in enumerate(zip(own.updates, ours.updates, strict=False), 1):
        for name in QUANTITIES:
            if one[name] != other[name] and name not in found:
                found[name] = FirstDifference(number, one[name], other[name])
    return found


def same_rows_otherwise(own: ScriptRecord, ours: ScriptRecord) -> bool:
    """Return True if both runs trained on the same rows, in another order or in other micro-batches."""
    counts = [
        Counter(row for update in record.updates for rows in update["rows"] for row in rows)
        for record in (own, ours)
    ]
    return counts[0] == counts[1]


def farthest_weight(own: ScriptRecord, ours: ScriptRecord) -> tuple[str, float] | None:
    """Return the parameter that differs most after the last update, and by how much; None if none differs."""
    from safetensors.torch import load_file

    one, other = (load_file(record.weights) for record in (own, ours))
    apart = {
        name: float((one[name].double() - other[name].double()).abs().max())
        for name in one.keys() & other.keys()
        if one[name].shape == other[name].shape and one[name].numel()
    }
    name = max(apart, key=lambda it: (apart[it], it), default=None)
    return None if name is None or not apart[name] else (name, apart[name])


def reason(found: dict[str, FirstDifference], same_rows: bool, sees_rows: bool = True) -> str:
    """Return the sentence that explains the first difference by what differs before it.

    Args:
        same_rows: both runs trained on the same rows, in whatever order.
        sees_rows: rows were seen at all.
    """
    if not found:
        return "same bits in every update"
    name, first = min(found.items(), key=lambda it: (it[1].update, QUANTITIES.index(it[0])))
    at = f"from update {first.update}"
    match name:
        case "rows" if same_rows:
            return f"{at} the same rows come in another order or in other batches; what follows differs with them"
        case "rows":
            return f"{at} the model gets other rows; what follows differs with them"
        case "rates":
            return (
                f"{at} the learning rate differs ({first.own} and {first.ours}); what follows differs with it"
            )
        case "digests":
            return (
                f"{at} the weights differ by rounding: rows, rate, loss and gradient norm have the same bits"
            )
    word = {"loss": "loss", "norm": "gradient norm"}[name]
    if first.is_rounding:
        return f"{at} the {word} differs by rounding (relative {ROUNDING:g} at most): the same sum in another order"
    if not sees_rows:
        return (
            f"{at} the {word} differs by a factor of {_factor(first)}; the rows are not known, since the script calls "
            "parts of its model: they may differ, as sampled ones do"
        )
    before = "rows and weights are the same" if name == "loss" else "rows, weights and loss are the same"
    return (
        f"{at} the {word} differs by a factor of {_factor(first)} although {before}: it is divided, weighted or "
        "clipped in another way"
    )


def _factor(first: FirstDifference) -> str:
    numbers = isinstance(first.own, float) and isinstance(first.ours, float)
    return f"{first.ours / first.own:.6g}" if numbers and first.own else "unknown size"
