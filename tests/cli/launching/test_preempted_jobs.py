"""The launcher of a job that a scheduler wants gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.cli.launching.machines import launch_on_both
from tests.dist.launch import ROOT, end_of, launch

from windlass.checkpoint.store import Store
from windlass.cli.launching.local import Requeue
from windlass.core.errors import EXIT_PREEMPTED

SCRIPT = Path(__file__).with_name("leaving_script.py")
# Rank 1 leaves; rank 0 stays.
DEAF = """
import os, time
from windlass.core.errors import Preempted
if os.environ["RANK"] == "1":
    raise Preempted(3, None)
time.sleep(1000)
"""
# In the first attempt all leave; in the second they end.
LEAVES_ONCE = """
import os, sys
from pathlib import Path
from windlass.core.errors import Preempted
left = Path(sys.argv[1], "left-" + os.environ["RANK"])
if not left.exists():
    left.write_text("3")
    raise Preempted(3, None)
Path(sys.argv[1], "ended-" + os.environ["RANK"]).touch()
"""


def launched(
    folder: Path, *words: object, flags: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    command = ("launch", "--cpu", "--num_processes", 2, *flags, SCRIPT, folder, *words)
    return end_of("windlass", *command, timeout=180, environ={"WINDLASS_HOME": "/nowhere", **(environ or {})})


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    launch(2, SCRIPT, folder, "none")
    return (folder / "hash").read_text()


def check_left(folder: Path, said: str) -> None:
    """All left at one step; it is not reported as a failure."""
    first, second = (int((folder / f"left-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert f"the job saved and exited at step {first}, as requested, and can be restarted" in said
    assert "the job failed" not in said
    assert "Traceback" not in said


def check_saved(folder: Path) -> None:
    """The script ended where it left, and that step is saved whole."""
    newest, problems = Store(folder / "run").newest_verified()
    assert newest is not None
    assert newest.name == f"checkpoint-{(folder / 'left-0').read_text()}"
    assert not problems
    assert not (folder / "hash").exists()


def fake_scontrol(folder: Path, then: str) -> dict[str, str]:
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{then}\n')
    scontrol.chmod(0o755)
    return {"SLURM_JOB_ID": "4711", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.dist
def test_it_ends_with_75_when_its_processes_have_saved(tmp_path: Path, untouched: str) -> None:
    environ = fake_scontrol(tmp_path, "echo not allowed >&2; exit 1")
    job = tmp_path / "job"
    code, said = launched(job, "launcher1", 2, flags=("--max_restarts", "1", "--requeue"), environ=environ)
    assert code == EXIT_PREEMPTED, said
    check_left(job, said)
    check_saved(job)
    assert "restart 1" not in said
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert "scontrol requeue 4711 failed: not allowed" in said
    launch(2, SCRIPT, job, "none")
    assert (job / "hash").read_text() == untouched


@pytest.mark.dist
def test_a_job_whose_processes_left_starts_again_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "leaves_once.py"
    script.write_text(LEAVES_ONCE)
    logs = tmp_path / "logs"
    flags = ("--num_processes", 2, "--requeue", "--max_requeues", "2", "--log_dir", logs)
    command = ("launch", "--cpu", *flags, script, tmp_path)
    code, said = end_of("windlass", *command, timeout=100, environ={"WINDLASS_HOME": "/nowhere"})
    assert code == 0, said
    check_left(tmp_path, said)
    # Marks of the first run are not those of the second.
    assert "without marks" not in said
    assert len(list(logs.glob("*/attempt-1"))) == 2
    assert said.count("restarting the job (1 of 2)") == 1
    assert all((tmp_path / f"ended-{rank}").exists() for rank in range(2))


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_whose_process_was_told_starts_again_by_itself(tmp_path: Path, untouched: str) -> None:
    code, said = launched(tmp_path, "rank1", flags=("--requeue", "--max_requeues", "2"))
    assert code == 0, said
    check_left(tmp_path, said)
    assert said.count("restarting the job (1 of 2)") == 1
    assert (tmp_path / "hash").read_text() == untouched


@pytest.mark.slow
@pytest.mark.dist
def test_the_launchers_of_all_machines_end_with_75(tmp_path: Path) -> None:
    codes, said = launch_on_both(SCRIPT, tmp_path, "launcher0")
    assert codes == [EXIT_PREEMPTED] * 2, "\n".join(said)
    for text in said:
        check_left(tmp_path, text)
    check_saved(tmp_path)


@pytest.mark.dist
def test_a_rank_that_does_not_leave_in_time_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    command = ("launch", "--cpu", "--num_processes", 2, "--preemption_grace", 1, script)
    code, said = end_of("windlass", *command, timeout=100, environ={"WINDLASS_HOME": "/nowhere"})
    assert code == 128 + signal.SIGTERM, said
    assert "the job failed: rank 0 was killed by SIGTERM" in said
    assert "rank 1 (machine 0): had saved and exited on request" in said


def test_who_told_whom_decides(capsys: pytest.CaptureFixture[str]) -> None:
    job = Requeue(2, {})
    assert not job.restarts_here(signalled=True)
    assert [job.restarts_here(signalled=False) for _ in range(3)] == [True, True, False]
    assert "restarted 2 time(s), the maximum of --max_requeues" in capsys.readouterr().err
    assert all(Requeue(None, {}).restarts_here(signalled=False) for _ in range(9))


def test_a_queue_is_asked_as_often_as_it_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake_scontrol(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert not Requeue(3, environ | {"SLURM_RESTART_COUNT": "2"}).restarts_here(signalled=True)
    assert "job 4711 is queued again" in capsys.readouterr().err
    assert not Requeue(3, environ | {"SLURM_RESTART_COUNT": "3"}).restarts_here(signalled=True)
    assert "restarted 3 time(s)" in capsys.readouterr().err
    assert not Requeue(None, environ).restarts_here(signalled=True, machine_rank=1)
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"


def test_a_queue_that_cannot_be_asked_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(ROOT))
    assert not Requeue(None, {"SLURM_JOB_ID": "4711"}).restarts_here(signalled=False)
    assert "scontrol requeue 4711 failed" in capsys.readouterr().err
