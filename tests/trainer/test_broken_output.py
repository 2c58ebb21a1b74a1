"""A run whose standard output breaks ends as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, run_script
from tests.trainer.broken_output_runs import CASES

from windlass.checkpoint.store import Store


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[object]]]:
    folder = tmp_path_factory.mktemp("broken")
    said = run_script(ROOT / "tests/trainer/broken_output_runs.py", folder, timeout=300)
    return folder, json.loads(said.strip().splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_run_is_complete_and_its_exit_code_is_zero(
    case: str, ended: tuple[Path, dict[str, list[object]]]
) -> None:
    folder, found = ended
    assert found[case] == [0, True]
    for kind in ("True", "False"):
        assert Store(folder / case / kind).newest_verified()[0] is not None


def test_letters_that_cannot_be_shown_are_written_out(ended: tuple[Path, dict[str, list[object]]]) -> None:
    said = (ended[0] / "ascii" / "said.txt").read_text("ascii")
    assert said.count("Gr\\xf6\\xdfe \\u5b66\\u7fd2 \\u2713") >= 10
    assert "a warning: Gr\\xf6\\xdfe" in said
    assert "***** train metrics *****" in said
