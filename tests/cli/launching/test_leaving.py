"""The launcher of a job that a scheduler wants gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, run_to_its_end

from windlass.cli.launching.requeue import back_into_the_queue, starts_again_here
from windlass.core.errors import EXIT_PREEMPTED

SCRIPT = Path(__file__).with_name("leaving_script.py")


def launched(
    folder: Path, *words: object, flags: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    command = ["-m", "windlass", "launch", "--cpu", "--num_processes", "2", *flags, SCRIPT, folder, *words]
    return run_to_its_end(
        [sys.executable, *map(str, command)],
        timeout=180,
        environ={"WINDLASS_HOME": "/nowhere", **(environ or {})},
    )


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    code, said = launched(folder, "nobody")
    assert code == 0, said
    return (folder / "hash").read_text()


@pytest.mark.dist
@pytest.mark.parametrize(("whom", "times"), [("launcher", 2), ("rank1", 1)])
def test_it_ends_with_75_when_its_processes_have_saved(
    whom: str, times: int, tmp_path: Path, untouched: str
) -> None:
    code, said = launched(tmp_path, whom, times)
    assert code == EXIT_PREEMPTED, said
    assert "told to leave; the job has saved" in said
    assert "the job failed" not in said
    assert "Traceback" not in said
    assert list((tmp_path / "run").glob("checkpoint-*/manifest.json"))
    assert not (tmp_path / "hash").exists(), "the script ended there"
    code, said = launched(tmp_path, "nobody")
    assert code == 0, said
    assert (tmp_path / "hash").read_text() == untouched


@pytest.mark.dist
def test_a_job_starts_again_by_itself(tmp_path: Path, untouched: str) -> None:
    code, said = launched(tmp_path, "rank1", flags=("--requeue",))
    assert code == 0, said
    assert said.count("starting the job again") == 1
    assert (tmp_path / "hash").read_text() == untouched


@pytest.mark.dist
@pytest.mark.parametrize("works", [True, False])
def test_under_slurm_the_job_goes_back_into_the_queue(works: bool, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n' + ("" if works else "echo not allowed >&2; exit 1\n")
    )
    scontrol.chmod(0o755)
    environ = {"SLURM_JOB_ID": "4711", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    code, said = launched(tmp_path / "job", "rank1", flags=("--requeue",), environ=environ)
    assert code == EXIT_PREEMPTED, said
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert ("job 4711 is queued again" if works else "scontrol requeue 4711 failed: not allowed") in said


def test_who_told_whom_decides() -> None:
    assert starts_again_here(told=False, environ={})
    assert not starts_again_here(told=True, environ={})
    assert not starts_again_here(told=False, environ={"SLURM_JOB_ID": "1"})


def test_a_queue_that_cannot_be_asked_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(ROOT))
    back_into_the_queue({"SLURM_JOB_ID": "4711"})
    assert "scontrol requeue 4711 failed" in capsys.readouterr().err
    back_into_the_queue({})
    assert capsys.readouterr().err == ""
