"""Histories of runs: attempts that are killed or whose disks fail, until one reaches the end; and what must hold."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.reliability.attempts import Ended, Strike, attempt
from tests.reliability.cases import SETS, Trial, trial
from tests.reliability.faults import (
    FAULTS,
    INTERRUPTS,
    KILLED_LEAVING,
    KILLS,
    LEAVE,
    UPLOADING,
    WORKER_KILLED,
    Fault,
)
from tests.reliability.whereabouts import logs, newest_whole
from tests.trainer.resume_cases import rows

from windlass.checkpoint.store import Store

KILLS_OF_A_HISTORY = 5
_GROUPS = {"kill": tuple(KILLS), "interrupt": INTERRUPTS, "leave": (LEAVE,), "fault": FAULTS}
CLEAN = "clean.json"
FULL_OR_FAILING = ("full disk", "failing disk")
LAST_SAVE_FAILED = "its last save failed"


@dataclass
class Told:
    """What came of a history; everything in it goes through JSON.

    Attributes:
        struck: kind of each kill and interrupt that struck, of each leave that was taken, and of each fault that was
            there.
        problems: what did not hold, each in one line.
    """

    name: str
    trial: str
    struck: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: bool = False
    differs: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What happens to the attempts of a history, one after another; the attempt after the last is left alone."""

    name: str
    trial: Trial
    faults: tuple[Fault, ...]
    worlds: tuple[int, ...]

    def cut(self, attempts: int) -> Plan:
        """The same history if nothing happens to it after so many attempts."""
        return replace(self, faults=self.faults[:attempts], worlds=self.worlds[: attempts + 1])


def plan(seed: int, name: str) -> Plan:
    """The history of a name: the same for the same seed.

    `kill-N`, `interrupt-N`, `leave-N` and `fault-N` are drawn at random; `kill-N-2` is the same cut short after what
    happens to its first two attempts. `operation-T-R-N` kills rank R of case T at its N-th file operation,
    `refused-T-R-N` lets that operation fail, `step-T-R-N` kills at the end of update N. Each may begin with the name of
    a set of cases: `zero_kill-N`.
    """
    group, *numbers = name.split("-")
    own, _, group = group.rpartition("_")
    trials = SETS[own or "standard"]
    if group in _GROUPS:
        whole = _random_plan(seed, f"{group}-{numbers[0]}", int(numbers[0]), group, trials)
        named = replace(whole, name=name)
        return named.cut(int(numbers[1])) if numbers[1:] else named
    chosen, rank, number = trials[int(numbers[0])], int(numbers[1]), int(numbers[2])
    kind = {"operation": "at a file operation", "refused": "failing disk", "step": "between updates"}[group]
    world = max(chosen.worlds)
    return Plan(name, chosen, (Fault(kind, 0.0, rank, number % 2 == 0, at=number),), (world, world))


def _random_plan(seed: int, name: str, number: int, group: str, trials: Sequence[Trial]) -> Plan:
    chance = random.Random(f"{seed} {name}")
    fit = [one for one in trials if not _unfit(one).issuperset(_GROUPS[group])]
    chosen = fit[number % len(fit)]
    unfit = _unfit(chosen)
    kinds = [kind for kind in _GROUPS[group] if kind not in unfit]
    chance.shuffle(kinds)
    count = 1 if group == "fault" else KILLS_OF_A_HISTORY
    worlds = tuple(chance.choice(chosen.worlds) for _ in range(count + 1))
    faults = tuple(
        Fault(
            kinds[(number // len(fit) + i) % len(kinds)],
            share=chance.random(),
            victim=chance.randrange(world),
            everyone=chance.random() < 0.5,
            then=_then(group, chance),
        )
        for i, world in enumerate(worlds[:-1])
    )
    return Plan(name, chosen, faults, worlds)


def _then(group: str, chance: random.Random) -> float | None:
    if group == "interrupt":
        return chance.random()
    return None if group == "kill" else chance.choice([None, chance.random()])


def _unfit(trial: Trial) -> frozenset[str]:
    """Kinds that cannot happen to a trial, or under which its end may differ."""
    none_there = {UPLOADING: trial.remote, WORKER_KILLED: trial.has_workers}
    return trial.unfit | {kind for kind, there in none_there.items() if not there}


def exhaustive(number: int, clean: Path, own: str = "standard") -> list[str]:
    """Names of histories that together strike case `number` of a set at every update and every file operation."""
    case, names = SETS[own][number], list[str]()
    for rank, end in enumerate(_ends(clean)):
        operations = range(1, end["counts"]["any"] + 1)
        names += [f"step-{number}-{rank}-{step}" for step in range(1, end["step"] + 1)]
        names += [f"operation-{number}-{rank}-{n}" for n in operations]
        if "failing disk" not in case.unfit:
            names += [f"refused-{number}-{rank}-{n}" for n in operations]
    return [f"{prefix_of(own)}{name}" for name in names]


def prefix_of(own: str) -> str:
    """What names of histories of a set of cases begin with."""
    return "" if own == "standard" else f"{own}_"


def clean_run(name: str, place: Path) -> None:
    """Make the undisturbed run of a case by its name; see `make_clean`."""
    make_clean(trial(name), place)


def make_clean(chosen: Trial, place: Path) -> None:
    """Train the case without disturbance in `place`; leaves the figures that histories need."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    started = time.monotonic()
    ended = attempt(chosen, place, max(chosen.worlds), resume=False)
    took = time.monotonic() - started
    assert ended.finished, f"{chosen.name}: the undisturbed run failed: {ended.codes}\n{_last_words(place)}"
    assert (place / "committed-0.txt").exists(), "commits go unnoticed"
    (place / CLEAN).write_text(json.dumps({"seconds": took}))


class History:
    """Makes a plan true in `place`, and compares its end with the undisturbed run in `clean`."""

    def __init__(self, plan: Plan, place: Path, clean: Path) -> None:
        self._plan, self._place, self._clean = plan, place, clean
        self._told = Told(plan.name, plan.trial.name)
        self._newest = 0  # step of the newest whole checkpoint that was seen
        self._seconds = json.loads((clean / CLEAN).read_text())["seconds"]
        self._ends = _ends(clean)

    def run(self) -> dict[str, Any]:
        """Gives a `Told` as plain values. The folder stays where something did not hold."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        started = time.monotonic()
        finished = False
        for fault, world in zip((*self._plan.faults, None), self._plan.worlds, strict=True):
            finished = self._attempt(fault, world)
            if finished or self._told.problems:
                break
        if finished and not self._told.problems:
            self._compare()
        self._told.seconds = round(time.monotonic() - started, 2)
        if not self._told.problems:
            shutil.rmtree(self._place)
        return asdict(self._told)

    def _problem(self, text: str) -> None:
        self._told.problems.append(text)

    def _attempt(self, fault: Fault | None, world: int) -> bool:
        """Return True if the run has come to its end."""
        if fault is not None and fault.kind == "damage":
            fault = self._damage(fault, world)
        if fault is not None and fault.kind == "stale folders":
            _plant(self._place / "run", random.Random(fault.share))
        newest = newest_whole(self._place, self._plan.trial)
        left = 1 - newest / self._ends[0]["step"]
        strike = None
        if fault is not None:
            counts = self._ends[min(fault.victim, len(self._ends) - 1)]["counts"]
            strike = Strike(fault, counts, left, self._seconds)
        ended = attempt(self._plan.trial, self._place, world, resume=newest > 0, strike=strike)
        self._judge(ended, fault)
        return ended.finished

    def _judge(self, ended: Ended, fault: Fault | None) -> None:
        if ended.hung:
            self._problem(f"ranks had to be ended by force: {ended.codes}")
        elif not ended.finished and (fault is None or not self._may_end(fault, ended)):
            self._problem(f"an attempt failed by itself: {ended.codes}; {_last_words(self._place)}")
        if fault is not None and (self._may_end(fault, ended) or (fault.kind in FAULTS and ended.finished)):
            self._told.struck.append(KILLED_LEAVING if fault.leaves and ended.killed else fault.kind)
        self._check_store()
        # Before its first update there is nothing to save: it begins again.
        if ended.left and not self._newest and any(_left_at(self._place)):
            self._problem("it left, and no checkpoint stands")

    def _may_end(self, fault: Fault, ended: Ended) -> bool:
        """Whether this fault may end an attempt like that."""
        if (fault.kills and ended.killed) or (fault.leaves and ended.left):
            return True
        if ended.finished or ended.hung:
            return False
        if fault.kind == WORKER_KILLED:
            return "worker" in _last_words(self._place)
        # A disk that fails until the run ends costs it the last checkpoint, which is an error.
        return fault.interrupts or (
            fault.kind in FULL_OR_FAILING and LAST_SAVE_FAILED in _last_words(self._place)
        )

    def _check_store(self) -> None:
        """Once a checkpoint was committed there is always a whole one, and never an older one than before."""
        step = newest_whole(self._place, self._plan.trial)
        announced = _announced(self._place, max(self._plan.worlds) if self._plan.trial.own_disks else 1)
        if step < max(self._newest, announced):
            self._told.lost = True
            self._problem(
                f"the newest whole checkpoint is {step}, after {max(self._newest, announced)} stood"
            )
        self._newest = step

    # --- damage between two attempts

    def _damage(self, fault: Fault, world: int) -> Fault | None:
        """Kill an attempt late, and damage what it left, where an older checkpoint can take its place."""
        late = Fault("between updates", 0.8, fault.victim, True)
        self._attempt(late, world)
        store = Store(self._place / "run")
        whole = store.list()
        if len(whole) < 2 or self._told.problems:
            return None
        _harm(whole[-1].path, random.Random(fault.share))
        self._told.struck.append("damage")
        (self._place / "committed-0.txt").unlink(missing_ok=True)
        self._newest = 0
        self._check_store()
        if self._newest != whole[-2].step:
            self._problem(
                f"of {whole[-1].path.name}, damaged, and {whole[-2].path.name} {self._newest} was taken"
            )
        return None

    # --- the end

    def _compare(self) -> None:
        try:
            if self._plan.trial.exact:
                assert _without_counts(_ends(self._place)) == _without_counts(self._ends)
                assert self._rows(self._place) == self._rows(self._clean)
            else:
                self._compare_nearly()
        except AssertionError as difference:
            self._told.differs = True
            lines = str(difference).strip().splitlines()
            self._problem("the end differs: " + (" ".join(lines)[:600] or self._difference()))

    def _rows(self, place: Path) -> list[dict[str, Any]]:
        return rows(logs(place, self._plan.trial))

    def _difference(self) -> str:
        """The first thing in which the two ends differ."""
        for ours, theirs in zip(_ends(self._place), self._ends, strict=False):
            for name in ours.keys() - {"counts"}:
                if ours[name] != theirs[name]:
                    return f"{name} is {ours[name]} instead of {theirs[name]}"
        here, clean = self._rows(self._place), self._rows(self._clean)
        found = (
            f"{ours} instead of {theirs}" for ours, theirs in zip(here, clean, strict=False) if ours != theirs
        )
        return "metrics.jsonl: " + (next(found, None) or f"{len(here)} rows instead of {len(clean)}")

    def _compare_nearly(self) -> None:
        assert _samples_by_step(self._place) == _samples_by_step(self._clean), "other samples"
        ours, theirs = ([row for row in self._rows(at) if "loss" in row] for at in (self._place, self._clean))
        assert [row["step"] for row in ours] == [row["step"] for row in theirs], "other steps were logged"
        assert [row["loss"] for row in ours] == pytest.approx(
            [row["loss"] for row in theirs], abs=self._plan.trial.tolerance
        ), "losses"


def _announced(place: Path, disks: int) -> int:
    """The last step that was committed on every disk."""
    paths = [place / f"committed-{rank}.txt" for rank in range(disks)]
    # A rank may be killed after it has made the file and before it has written to it.
    steps = (path.read_text().split() if path.exists() else [] for path in paths)
    return min(int(written[-1]) if written else 0 for written in steps)


def _left_at(place: Path) -> list[int]:
    """The steps at which the ranks exited that were preempted last."""
    return [int(path.read_text()) for path in place.glob("left-*.txt")]


def _ends(place: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(place.glob("end-*.json"))]


def _without_counts(ends: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**end, "counts": None} for end in ends]


def _samples_by_step(place: Path) -> dict[int, list[int]]:
    """The samples of each update over all ranks, as the last attempt at it saw them.

    Several ranks look at their first batch more than once before they train on it.
    """
    seen: dict[int, tuple[int, list[int]]] = {}
    for path in place.glob("seen-*.txt"):
        for line in path.read_text().splitlines():
            attempt, step, *samples = map(int, line.split())
            last, known = seen.get(step, (-1, []))
            if attempt >= last:
                seen[step] = attempt, samples + (known if attempt == last else [])
    return {step: sorted(set(samples)) for step, (_, samples) in sorted(seen.items())}


def _last_words(place: Path) -> str:
    """The last errors that the ranks of the last attempt told of."""
    said = sorted(place.glob("said-*.txt"), key=lambda path: path.stat().st_mtime)
    errors = ([line for line in path.read_text().splitlines() if "Error" in line] for path in said[-3:])
    return " | ".join(lines[-1][:300] for lines in errors if lines)


def _plant(run: Path, chance: random.Random) -> None:
    """What interrupted saves and other programs leave behind: drafts, removals, a folder in the way."""
    step = chance.randrange(2, 6)
    for name in (f"tmp-checkpoint-{step}", f"tmp-removed-checkpoint-{step}", f"checkpoint-{step + 1}"):
        folder = run / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(chance.randbytes(500))


def _harm(folder: Path, chance: random.Random) -> None:
    """One of the things that happen to a file."""
    victim = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = victim.read_bytes()
    place = chance.randrange(len(content))
    match chance.choice(["flip", "cut", "remove", "link"]):
        case "flip":
            victim.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
            )
        case "cut":
            victim.write_bytes(content[:place])
        case "remove":
            victim.unlink()
        case "link":
            aside = folder.parent / "linked"
            os.replace(victim, aside)
            victim.symlink_to(aside)
