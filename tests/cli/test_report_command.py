from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.callbacks.test_report import log_run

from windlass.checkpoint.run_lock import RunLock
from windlass.cli.main import main


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_of_the_run_are_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A formula to matplotlib, and not UTF-8, as of an old archive.
    run, shown = tmp_path / os.fsdecode(b"run $_$ \xff"), tmp_path / "shown"
    log_run(run, max_steps=10)
    before = files(run)
    assert main(["report", str(run), "--output-dir", str(shown)]) == 0
    assert files(run) == before
    assert capsys.readouterr().out.splitlines() == [str(path) for path in sorted(shown.iterdir())]
    assert "killed after step 5 of 10" in (shown / "report.html").read_text()


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_run(tmp_path, max_steps=10)
    with RunLock(tmp_path):
        assert main(["report", str(tmp_path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert str(tmp_path / "report.html") in written
    assert all(Path(path).is_file() for path in written)
    assert "running, step 5 of 10" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("has_runs", [False, True])
def test_a_folder_that_is_not_a_run(
    tmp_path: Path, has_runs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_runs:
        log_run(tmp_path / "first")
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert ("give one of them: " + str(tmp_path / "first") in told) == has_runs
    assert ("is not the folder of a run" in told) != has_runs


def test_without_the_package_that_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 0
    assert 'pip install "windlass-trainer[report]"' in capsys.readouterr().err
    assert not (tmp_path / "training.png").exists()
