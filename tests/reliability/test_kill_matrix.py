"""The short form of the kill matrix: every case is killed, and every kind of kill, interrupt and fault strikes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.reliability.cases import TRIALS, ZERO_TRIALS, StepsAndScores, Trial
from tests.reliability.faults import FAULTS, INTERRUPTS, KILLS, LEAVES, Fault
from tests.reliability.histories import History, Plan, make_clean
from tests.reliability.kill_matrix import Matrix, matrix_in, memory
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
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with (
        tempfile.TemporaryDirectory(dir=memory(), prefix="windlass-matrix-") as name,
        matrix_in(Path(name), SEED, 2) as made,
    ):
        yield made


@pytest.mark.dist
@pytest.mark.parametrize("group", _SHORT)
def test_runs_end_as_if_nothing_had_happened(matrix: Matrix, group: str) -> None:
    check(matrix, group, _SHORT[group])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("group", _LONG)
def test_every_case_ends_as_if_nothing_had_happened(matrix: Matrix, group: str) -> None:
    """Each is struck five times before it may reach its end, or meets with a fault."""
    check(matrix, group, _LONG[group])


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
def test_runs_under_deepspeed_end_as_if_nothing_had_happened() -> None:
    """Each case is killed once or twice, or meets with a fault."""
    with (
        tempfile.TemporaryDirectory(dir=memory(), prefix="windlass-matrix-") as name,
        matrix_in(Path(name), SEED, 2, "zero") as made,
    ):
        cases = range(len(ZERO_TRIALS))
        make(made, [f"zero_kill-{number}-2" for number in cases])
        make(made, [f"zero_fault-{number}" for number in cases[1::2]])
        assert sum(len(told["struck"]) for told in made.results) >= len(ZERO_TRIALS)


def make(matrix: Matrix, histories: list[str]) -> None:
    problems: list[str] = []
    matrix.make(histories, problems.append)
    assert not problems, "\n".join(problems)


def check(matrix: Matrix, group: str, histories: list[str]) -> None:
    make(matrix, histories)
    struck = {kind for told in matrix.results if told["name"] in histories for kind in told["struck"]}
    missing = set(_KINDS[group]) - struck
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
