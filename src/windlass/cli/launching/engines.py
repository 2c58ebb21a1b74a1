"""The engines that carry a job out, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.config.launch import LaunchPlan


@dataclass(frozen=True, slots=True)
class Engine:
    """`run` carries a plan out and gives the exit code; `show` gives the job it would run, as text."""

    run: Callable[[LaunchPlan], int]
    show: Callable[[LaunchPlan], str]


def engine(name: str) -> Engine:
    """The engine of that name: "local", "slurm" or "ray". Only what it needs is imported."""
    module = importlib.import_module(f"windlass.cli.launching.{name}")
    return Engine(getattr(module, f"run_{name}"), getattr(module, f"print_{name}"))
