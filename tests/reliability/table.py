"""The table of cases and kinds of kills that stands in docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import caption, facts, rewrite, table
from tests.reliability.cases import SETS, Trial
from tests.reliability.faults import FAULTS, INTERRUPTS, KILLS, LEAVES

SECTIONS = {"standard": "kill matrix", "zero": "kill matrix of ZeRO", "layouts": "kill matrix of layouts"}
_Results = Iterable[dict[str, Any]]


def write(results: _Results, command: str, page: Path | None, own: str = "standard") -> None:
    """Print the tables of a set of cases, and put them into the page's section where one is given."""
    told = list(results)
    text = "\n\n".join([by_case(told, SETS[own]), by_kind(told), caption({**facts(), "command": command})])
    print(text)
    if page is not None:
        rewrite(page, SECTIONS[own], text)


def by_case(results: _Results, trials: Sequence[Trial]) -> str:
    """For each case: kills, leaves, faults, ends reached, checkpoints lost, ends that differ, other problems."""
    told = list(results)
    rows = [_row(trial.name, [one for one in told if one["trial"] == trial.name]) for trial in trials]
    return table(_HEAD, [*rows, _row("**all**", told)])


_HEAD = (
    "case",
    "kills",
    "interrupts",
    "preempted",
    "faults",
    "runs",
    "came to their end",
    "lost a checkpoint",
    "end differs",
)


def _row(name: str, told: list[dict[str, Any]]) -> tuple[object, ...]:
    kinds = [kind for one in told for kind in one["struck"]]
    struck = [sum(kind in group for kind in kinds) for group in (KILLS, INTERRUPTS, LEAVES, FAULTS)]
    reached = sum(not one["problems"] or one["differs"] for one in told)
    return (
        name, *struck, len(told), reached, sum(one["lost"] for one in told), sum(one["differs"] for one in told)
    )  # fmt: skip


def by_kind(results: _Results) -> str:
    """How often each kind of kill, leave and fault struck."""
    struck = [kind for one in results for kind in one["struck"]]
    return table(
        ("what happened", "times"),
        [(kind, struck.count(kind)) for kind in (*KILLS, *INTERRUPTS, *LEAVES, *FAULTS)],
    )
