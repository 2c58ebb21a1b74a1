from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.cli.launching.test_local import windlass

from windlass.cli import selftest, selftest_ranks
from windlass.compat.state import AcceleratorState
from windlass.dist.gang import leave


@pytest.fixture
def stateless() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    leave()


@pytest.mark.dist
def test_this_installation_trains_in_two_processes() -> None:
    code, said = windlass("test", "--json")
    assert code == 0, said
    found = json.loads(said[said.index("{") :])
    assert found["passed"] is True
    assert [one["result"] for one in found["checks"]] == ["passed"] * 4
    assert found["launched_with"] == ["--num_processes", "2", "--cpu"]


def test_checks_that_were_only_shown_are_not_said_to_have_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.selftest_command(["--print"]) == 0
    assert "passed" not in capsys.readouterr().out
    assert selftest.selftest_command(["--print", "--json"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said[said.index("\n{") :])["passed"] is None


def test_a_file_with_dashes_in_its_flag_is_not_overridden_by_two_processes() -> None:
    words = ["--config-file", "a.yaml", "--num-processes", "3", "--cpu"]
    options, flags = selftest.build_parser().parse_known_args(words)
    assert (options.config_file, options.num_processes, flags) == ("a.yaml", 3, ["--cpu"])


@pytest.mark.usefixtures("stateless")
def test_on_several_machines_it_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert selftest_ranks.main() == 0
    said = capsys.readouterr().out
    assert said.count("  ok  ") == 3
    assert "windlass test: all checks passed" in said
    assert "a checkpoint is loaded as it was saved: skipped, since no folder is known" in said
