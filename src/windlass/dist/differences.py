"""How it is said that values differ between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from windlass.core.redact import is_secret_name

_SHOWN_FIELDS = 8
_SHOWN_CHARACTERS = 120
_MISSING = "(missing)"


def differences(everywhere: list[dict[str, str]], ranks: Sequence[int] | None = None) -> list[str]:
    """One line for each field whose value is not the same in all of `everywhere`. `ranks`: whose values they are; None:
    those of all ranks, in order.
    """
    names = list(dict.fromkeys(name for values in everywhere for name in values))
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, values in zip(ranks or range(len(everywhere)), everywhere, strict=True):
            ranks_of[values.get(name, _MISSING)].append(rank)
        if len(ranks_of) > 1:
            shown = (f"{_short(name, value)} on {_ranks(having)}" for value, having in ranks_of.items())
            lines.append(f"{name}: {', '.join(shown)}")
    more = len(lines) - _SHOWN_FIELDS
    return [*lines[:_SHOWN_FIELDS], *([f"and {more} more"] if more > 0 else [])]


def _short(name: str, value: str) -> str:
    if is_secret_name(name):
        return "(a secret value)"
    return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
