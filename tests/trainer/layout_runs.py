"""Runs of cases on several ranks, which are compared with one process, continued elsewhere, and killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.dist.launch import failure_on_ranks, on_ranks

Case = tuple[str, dict[str, Any], dict[str, Any]]  # model, layout, arguments
Results = list[dict[str, dict[str, list[float]]]]  # of each rank, by case
Run = Callable[..., Results]
DOUBLE = 1e-10  # rounding in float64


def runner(main: Callable[..., Any], folders: Callable[[], Path]) -> Run:
    """Return a function that runs cases by `main` on some ranks, in a folder given or in one of `folders`. What one
    process comes to is computed once for all tests that ask.
    """
    alone: dict[str, dict[str, list[float]]] = {}

    def launched(world: int, cases: dict[str, Case], folder: Path) -> Results:
        folder.mkdir(exist_ok=True)
        return on_ranks(world, main, folder, cases)

    def run(world: int, cases: dict[str, Case], folder: Path | None = None) -> Results:
        if world > 1 or folder is not None:
            return launched(world, cases, folder or folders())
        keys = {name: json.dumps(case, sort_keys=True) for name, case in cases.items()}
        missing = {keys[name]: name for name in cases if keys[name] not in alone}
        if missing:
            [found] = launched(1, {name: cases[name] for name in missing.values()}, folders())
            alone.update({key: found[name] for key, name in missing.items()})
        return [{name: alone[key] for name, key in keys.items()}]

    return run


def check_equal(
    run: Run,
    world: int,
    cases: dict[str, Case],
    alone: dict[str, Any] | None = None,
) -> None:
    """`cases` on `world` ranks give what one process gives; `alone` are its arguments beside those of the case. Four
    updates unless a case sets another number; the second has a micro-batch without targets.
    """
    cases = {
        name: (model, layout, {"max_steps": 4, **changes}) for name, (model, layout, changes) in cases.items()
    }
    spread = {"fsdp", "gradient_checkpointing"}
    single: dict[str, Case] = {
        name: (model, {}, {key: value for key, value in changes.items() if key not in spread} | (alone or {}))
        for name, (model, _, changes) in cases.items()
    }
    [expected] = run(1, single)
    for rank, found in enumerate(run(world, cases)):
        for name in cases:
            for what, values in expected[name].items():
                difference = np.abs(np.array(found[name][what]) - np.array(values)).max()
                assert difference <= DOUBLE, f"{name}, rank {rank}, {what}: off by {difference}"


def rewind(folder: Path) -> None:
    """Leave each run of a folder as it was when it had saved its third update."""
    for newest in folder.glob("*/checkpoint-6"):
        shutil.rmtree(newest)


def check_continued(
    run: Run, folder: Path, cases: dict[str, Case], others: dict[str, Case], ranks: int = 2, first: int = 2
) -> None:
    """Runs of `first` ranks are continued from their third update: on the same layout to the bit; on one process, and
    as `others` on `ranks` ranks, to the same results.
    """
    whole = run(first, cases, folder / "same")[0]
    rewind(folder / "same")
    for copy in ("alone", "other"):
        shutil.copytree(folder / "same", folder / copy)
    again = run(first, resumed(cases), folder / "same")[0]
    layout = {"fsdp"}
    alone: dict[str, Case] = {
        name: (model, {}, {key: value for key, value in each.items() if key not in layout})
        for name, (model, _, each) in cases.items()
    }
    [one] = run(1, resumed(alone), folder / "alone")
    other = run(ranks, resumed(others), folder / "other")[0]
    for name in cases:
        assert again[name]["weights"] == whole[name]["weights"], "to the bit"
        # All reports of the second half but the last, the mean loss of the call.
        count = len(again[name]["reported"])
        for found in (one[name], other[name]):
            for ours, theirs in (
                (found["weights"], whole[name]["weights"]),
                (found["reported"][-count:-1], whole[name]["reported"][-count:-1]),
            ):
                assert np.abs(np.array(ours) - np.array(theirs)).max() <= DOUBLE, name


def check_killed(
    run: Run,
    main: Callable[..., Any],
    folder: Path,
    case: Case,
    ranks: int,
    steps: Sequence[int],
    updates: int = 6,
) -> str:
    """A run whose last rank is killed at the end of some updates, and before the update of others, and continued each
    time, ends with the bits of one that was not. Return what the other ranks said last.
    """
    model, layout, changes = case
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": updates, "resume": "auto", **changes}
    whole = run(ranks, {"x": (model, layout, saving)}, folder / "whole")
    killed, said = folder / "killed", ""
    killed.mkdir()
    for number, step in enumerate(steps):
        event = ("on_step_end", "on_pre_optimizer_step")[number % 2]
        struck: Case = (model, layout, {**saving, "killed_at": step, "killed_on": event})
        said = failure_on_ranks(ranks, main, killed, {"x": struck})
        assert "eval_loss" not in said
    found = run(ranks, {"x": (model, layout, saving)}, killed)
    assert [one["x"]["weights"] for one in found] == [one["x"]["weights"] for one in whole]
    return said


def resumed(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: (model, parallel, {**changes, "resume": True})
        for name, (model, parallel, changes) in cases.items()
    }
