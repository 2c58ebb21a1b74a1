"""The six questions about a case, and what they come to."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.reliability.combined.case import Case
from tests.reliability.combined.ranks import attempt, removed
from tests.reliability.combined.recipe import GLOBAL_BATCH, Effect, Outcome, Recipe

HELD, REFUSED, SHORT = "held", "refused", "short"
_COMPARED = ("loss", "grad_norm", "eval_loss")
# Of a configuration: field=value: fix. Of models and data: a sentence.
_CLEAR = re.compile(r"ConfigError: .*\n(  - [^=\n]+=.+: .{10,}\n?)+", re.DOTALL)
# What a library raises in a probe of the model names no field.
_SENTENCE = re.compile(
    r"((Data|RankMismatch|MissingDependency)Error: .{30,}|ModelError: .*\b[a-z_]+=\w)", re.DOTALL
)


@dataclass
class Verdict:
    """What came of a case; everything in it goes through JSON."""

    spec: str
    verdict: str = HELD
    problems: list[str] = field(default_factory=list)
    refused: str = ""
    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def examine(case: Case, folder: Path) -> Verdict:
    """Ask all questions that the case has an answer to. The folder is removed if all hold."""
    started = time.monotonic()
    verdict = Verdict(case.spec)
    removed(folder)
    examination = Examination(case, folder)
    whole = examination.whole
    if whole.refused:
        verdict.verdict, verdict.refused = REFUSED, whole.refused
        if not (_CLEAR.match(whole.refused) or _SENTENCE.match(whole.refused)):
            verdict.problems.append(f"refused without field, value and fix: {whole.refused}")
    elif whole.crashed:
        verdict.problems.append(f"crashed: {whole.crashed}")
    else:
        for name, problems in examination.answers():
            verdict.asked.append(name)
            verdict.problems += [f"{name}: {problem}" for problem in problems]
    if verdict.problems:
        verdict.verdict = SHORT
    else:
        removed(folder)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


class Examination:
    """The runs that belong to a case, and how they compare."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder, self._recipe = case, folder, case.recipe()
        self.whole = attempt(self._recipe, folder / "whole")

    def answers(self) -> Iterator[tuple[str, list[str]]]:
        yield "killed and resumed", self._resumed()
        if not self._recipe.draws:
            yield self._other_ranks(), self._on_other_ranks()
        if self._may_change_evaluations():
            yield "an evaluation changes nothing", self._with_other_evaluations()
        if self.whole.reread is not None:
            yield "what was saved gives the evaluation", self._read_back()
        # All runs come before all checks, which import libraries that may ask for an accelerator: no run can be forked
        # with it after that.
        without = {feature.name: self._without(feature) for feature, _ in self._case.features}
        for feature, value in self._case.features:
            # A run that is refused without it has nothing to be compared with: stages need references computed before.
            if not without[feature.name].refused:
                yield f"the effect of {feature.name}", self._effect(feature, value, without[feature.name])

    def _resumed(self) -> list[str]:
        rank = int(self._case.kill * 1000) % self._recipe.world
        place = 1 + int(self._case.kill * self.whole.instants[rank])
        folder = self._folder / "killed"
        first = attempt(self._recipe, folder, kill_at=(rank, place))
        if first.crashed or first.refused:
            return [f"the attempt to be killed ended: {first.crashed or first.refused}"]
        end = attempt(self._recipe, folder, resume=True) if first.killed else first
        where = f"killed at instant {place} of rank {rank}"
        if end.crashed or end.refused:
            return [f"{where}, resuming ended: {end.crashed or end.refused}"]
        problems = [f"{where}: other bits"] if end.bits != self.whole.bits else []
        if end.rows != self.whole.rows:
            problems.append(f"{where}: {_first_difference(end.rows, self.whole.rows)}")
        return problems

    def _other_ranks(self) -> str:
        return (
            "two processes equal one" if self._recipe.on_processor else "an accelerator equals the processor"
        )

    def _on_other_ranks(self) -> list[str]:
        other = copy.deepcopy(self._recipe)
        if other.on_processor:
            other.strategy, other.world = ("ddp", 2) if other.world == 1 else ("alone", 1)
        other.on_processor = True
        other.axes = {}
        if "fsdp_config" in other.arguments:
            del other.arguments["fsdp_config"]
        assert GLOBAL_BATCH % other.world == 0
        found = attempt(_unsaved(other), self._folder / "others")
        name = f"{other.strategy} on {other.world}"
        if found.crashed or found.refused:
            return [f"{name}: {found.crashed or found.refused}"]
        whole = self.whole
        if self._recipe.arguments.get("fp16"):
            found, whole = _before_other_overflows(found, whole)
        return _nearly(found, whole, self._recipe.tolerance, self._recipe.by_hand or 0.0, name)

    def _may_change_evaluations(self) -> bool:
        asked = self._recipe.arguments
        led = asked.get("lr_scheduler_type") == "reduce_lr_on_plateau" or asked.get("save_strategy") == "best"
        return not (led or asked.get("load_best_model_at_end") or asked.get("bf16_full_eval"))

    def _with_other_evaluations(self) -> list[str]:
        other = copy.deepcopy(self._recipe)
        if other.arguments.get("eval_strategy", "no") == "no":
            other.arguments |= {"eval_strategy": "steps", "eval_steps": 2}
        else:
            other.arguments |= {"eval_strategy": "no", "eval_on_start": False}
        found = attempt(_unsaved(other), self._folder / "evaluated")
        if found.crashed or found.refused:
            return [found.crashed or found.refused]
        problems = ["other bits"] if found.bits != self.whole.bits else []
        if found.series("loss") != self.whole.series("loss"):
            problems.append(f"losses {found.series('loss')[:4]}, not {self.whole.series('loss')[:4]}")
        return problems

    def _read_back(self) -> list[str]:
        reported, read = self.whole.evaluated, self.whole.reread
        assert self._recipe.by_hand is not None
        if reported == pytest.approx(read, rel=self._recipe.by_hand):
            return []
        return [f"reported {reported}, read back {read}"]

    def _without(self, feature: Any) -> Outcome:
        """The run without a feature, where its check compares with that."""
        if not feature.compared:
            return Outcome()
        recipe = self._case.without(feature.name).recipe()
        return attempt(_unsaved(recipe), self._folder / f"without-{feature.name}")

    def _effect(self, feature: Any, value: str, without: Outcome) -> list[str]:
        if without.crashed:
            return [f"without it: {without.crashed}"]
        try:
            feature.check(Effect(self._recipe, value, self.whole, without))
        except AssertionError as problem:
            return [str(problem).strip().partition("\n")[0] or f"{value} has no effect"]
        return []


def _unsaved(recipe: Recipe) -> Recipe:
    """The same without checkpoints, which change nothing, where nothing is read from them."""
    asked = recipe.arguments
    if asked.get("save_strategy") == "best" or asked.get("load_best_model_at_end"):
        return recipe
    return replace(recipe, arguments={**asked, "save_strategy": "no"})


def _before_other_overflows(found: Outcome, whole: Outcome) -> tuple[Outcome, Outcome]:
    """Both before the first update that one of them skips: from there on the scale of the fp16 loss differs, and with
    it which updates are skipped.
    """
    norms = zip(found.series("grad_norm"), whole.series("grad_norm"), strict=False)
    skipped = (at for at, (one, other) in enumerate(norms) if math.isfinite(one) != math.isfinite(other))
    if (end := next(skipped, None)) is None:
        return found, whole

    def begun(outcome: Outcome) -> Outcome:
        return replace(outcome, rows=[row for row in outcome.rows if "grad_norm" in row][:end], evaluated=0.0)

    return begun(found), begun(whole)


def _nearly(found: Outcome, whole: Outcome, tolerance: float, by_hand: float, name: str) -> list[str]:
    problems = []
    for column in _COMPARED:
        ours, theirs = found.series(column), whole.series(column)
        if ours != pytest.approx(theirs, rel=tolerance, abs=tolerance / 10, nan_ok=True):
            problems.append(f"{name}: {column} {_shown(ours)}, not {_shown(theirs)}")
    if found.evaluated != pytest.approx(whole.evaluated, rel=max(tolerance, by_hand)):
        problems.append(f"{name}: evaluated {found.evaluated}, not {whole.evaluated}")
    return problems


def _shown(values: list[float]) -> str:
    return " ".join(f"{value:.8g}" for value in values[:6])


def _first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            names = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
            return f"row of step {one.get('step')}: " + ", ".join(
                f"{name} {one.get(name)}, not {other.get(name)}" for name in sorted(names)[:4]
            )
    return f"{len(ours)} rows, not {len(theirs)}"
