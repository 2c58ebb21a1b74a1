"""The short form of the kill matrix: every case is killed, and every kind of kill, interrupt and fault strikes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.dist.launch import on_ranks
from tests.reliability.cases import TRIALS, ZERO_TRIALS, StepsAndScores, Trial
from tests.reliability.faults import FAULTS, INTERRUPTS, KILLS, LEAVES, Fault
from tests.reliability.histories import History, Plan, make_clean
from tests.reliability.kill_matrix import matrix_in, memory
from tests.reliability.table import write
from tests.trainer.resume_cases import Case
from tests.zero.needed import needs_deepspeed

from windlass import Trainer
from windlass.checkpoint.store import Store

SEED = 0
_KINDS = {"kill": KILLS, "interrupt": INTERRUPTS, "leave": LEAVES, "fault": FAULTS}
_ALL = range(len(TRIALS))
# One or two kills for every second case, two interrupts or one fault for others: each kind is among them.
_SHORT = {
    "kill": [f"kill-{number}-{1 + number // 2 % 2}" for number in _ALL[::2]],
    "interrupt": [f"interrupt-{number}-2" for number in _ALL[1::6]],
    "fault": [f"fault-{number}" for number in _ALL[1::2]],
}
_LONG = {group: [f"{group}-{number}" for number in _ALL] for group in _KINDS}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory(), prefix="windlass-matrix-") as name:
        yield Path(name)


@pytest.mark.dist
@pytest.mark.parametrize("group", _SHORT)
def test_runs_end_as_if_nothing_had_happened(place: Path, group: str) -> None:
    check(place, group, _SHORT[group])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("group", _LONG)
def test_every_case_ends_as_if_nothing_had_happened(place: Path, group: str) -> None:
    """Each is struck five times before it may reach its end, or meets with a fault."""
    check(place, group, _LONG[group], timeout=3500)


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
def test_runs_under_deepspeed_end_as_if_nothing_had_happened(place: Path) -> None:
    """Each case is killed once or twice, or meets with a fault."""
    cases = range(len(ZERO_TRIALS))
    kills, faults = [f"zero_kill-{n}-2" for n in cases], [f"zero_fault-{n}" for n in cases[1::2]]
    results = make(place / "zero", [*kills, *faults], "zero", timeout=3500)
    assert sum(len(told["struck"]) for told in results) >= len(ZERO_TRIALS)


def make(
    place: Path, histories: list[str], own: str = "standard", timeout: float = 280
) -> list[dict[str, Any]]:
    """Make histories, and return what came of them. They are made in a fork of the process that has imported
    everything: this one is larger, so that to fork its ranks takes longer.
    """
    ((results, problems),) = on_ranks(0, made, place, histories, own, timeout=timeout)
    assert not problems, "\n".join(problems)
    return [told for told in results if told["name"] in histories]


def made(place: Path, histories: list[str], own: str) -> tuple[list[dict[str, Any]], list[str]]:
    problems: list[str] = []
    with matrix_in(place, SEED, 2, own) as matrix:
        matrix.make(histories, problems.append)
        return matrix.results, problems


def check(place: Path, group: str, histories: list[str], timeout: float = 280) -> None:
    results = make(place, histories, timeout=timeout)
    missing = set(_KINDS[group]) - {kind for told in results for kind in told["struck"]}
    assert len(missing) <= 1, f"{missing} did not strike"


# --- the matrix finds what is wrong ---------------------------------------------------------------------------------


class Forgetful(StepsAndScores):
    """Keeps nothing over a resume."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


class Careless(Trainer):
    """Removes old checkpoints before the new one stands."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        commit = Store.commit

        def careless_commit(store: Store, draft: Any) -> None:
            for info in store.list():
                store.remove(info.path)
            commit(store, draft)

        with mock.patch.object(Store, "commit", careless_commit):
            return super().train(*args, **kwargs)


def told_of(folder: Path, trial: Trial, *faults: Fault) -> dict[str, Any]:
    """What comes of a history of this case."""
    chosen = Plan("own", trial, faults, (1,) * (len(faults) + 1))
    in_order = trial.name.replace(" ", "-")
    make_clean(trial, folder / in_order)
    return History(chosen, folder / "history", folder / in_order).run()


def test_state_that_is_lost_is_found(tmp_path: Path) -> None:
    forgetful = Trial("forgetful", Case({"eval_strategy": "epoch"}, callbacks=lambda: [Forgetful()]))
    told = told_of(tmp_path, forgetful, Fault("between updates", 0.5))
    assert told["differs"]
    assert "own_steps" in told["problems"][0]


def test_a_checkpoint_that_is_lost_is_found(tmp_path: Path) -> None:
    """Its second commit is interrupted, at one place of several, after the first checkpoint was removed."""
    careless = Trial("careless", Case({"save_in_background": False}, trainer=Careless))
    told = [told_of(tmp_path, careless, Fault("around a rename", 0.0, at=place)) for place in (8, 9, 10)]
    lost = [one for one in told if one["lost"]]
    assert lost, told
    assert "newest whole checkpoint is 0, after 1 stood" in lost[0]["problems"][0]


def test_the_tables_are_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: kill matrix -->\n<!-- end: kill matrix -->\n")
    told = {
        "trial": TRIALS[0].name,
        "struck": [next(iter(KILLS))],
        "problems": [],
        "lost": False,
        "differs": False,
    }
    write([told], "python -m tests.reliability.kill_matrix --kills 1", page)
    assert f"| {TRIALS[0].name} | 1 | 0 | 0 | 0 | 1 | 1 | 0 | 0 |" in page.read_text()
    assert "`python -m tests.reliability.kill_matrix --kills 1` on " in page.read_text()
