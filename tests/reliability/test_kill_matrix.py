"""The short form of the kill matrix: every case and every kind of kill and fault, a few times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.reliability.cases import TRIALS
from tests.reliability.dooms import FAULTS, KILLS
from tests.reliability.kill_matrix import Matrix, matrix_in, memory

SEED = 0


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with (
        tempfile.TemporaryDirectory(dir=memory(), prefix="windlass-matrix-") as name,
        matrix_in(Path(name), SEED, 2) as made,
    ):
        yield made


@pytest.mark.dist
@pytest.mark.parametrize("fault", [False, True], ids=["killed", "on failing disks"])
def test_runs_end_as_if_nothing_had_happened(matrix: Matrix, fault: bool) -> None:
    problems: list[str] = []
    matrix.make([(number, fault) for number in range(len(TRIALS))], problems.append)
    assert not problems, "\n".join(problems)
    struck = {kind for told in matrix.results for kind in told["struck"] if told["fault"] == fault}
    assert len(struck) >= len(FAULTS if fault else KILLS) - 1, f"only {struck} struck"
