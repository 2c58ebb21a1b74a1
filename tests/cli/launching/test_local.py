"""`windlass launch` on one machine: what is said when a rank fails, and that nothing of the job is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import end_all, end_of

SCRIPT = Path(__file__).parent / "failing_ranks.py"


def windlass(*words: object, timeout: float = 120) -> tuple[int, str]:
    """Exit code and everything printed."""
    return end_of("windlass", *words, timeout=timeout, environ={"WINDLASS_HOME": "/nowhere"})


def launch(how: str, *flags: object) -> tuple[int, str]:
    return windlass("launch", "--cpu", "--num_processes", 2, *flags, SCRIPT, how)


@pytest.mark.dist
def test_the_first_rank_that_failed_is_named_with_its_step_call_and_traceback(tmp_path: Path) -> None:
    code, said = launch("raises", "--log_dir", tmp_path, "--tee", "3")
    assert code == 1
    assert "the job failed: rank 1 raised ValueError: row 17 is damaged [step 2, in 'data']" in said
    assert 'raise ValueError("row 17 is damaged")' in said
    assert "rank 0 (machine 0): " in said
    assert "exit code 0" not in said
    assert "windlass/cli/launching/worker.py" not in said.split("windlass launch:")[1]
    (report,) = tmp_path.rglob("report.txt")
    assert "rank 1 raised ValueError" in report.read_text()
    assert any("row 17 is damaged" in log.read_text() for log in tmp_path.rglob("stderr.log"))


@pytest.mark.dist
def test_a_script_that_changes_its_working_directory_loses_no_report(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nos.chdir('/')\nraise ValueError('row 17 is damaged')\n")
    words = ("launch", "--cpu", "--num_processes", 1, "--log_dir", "logs", "script.py")
    code, said = end_of("windlass", *words, cwd=tmp_path, environ={"WINDLASS_HOME": "/nowhere"})
    assert code == 1
    assert "the job failed: rank 0 raised ValueError: row 17 is damaged" in said


@pytest.mark.dist
def test_a_rank_that_leaves_early_is_named_though_another_failed() -> None:
    code, said = launch("leaves")
    assert code == 1
    assert "rank 1 ended while others still waited for it [step 2, in 'data']; rank 0 then failed" in said
    assert "rank 1 (machine 0): had ended with exit code 0" in said


@pytest.mark.dist
def test_a_job_that_stands_still_is_ended_with_all_stacks() -> None:
    code, said = launch("stalls", "--stall_timeout", 2)
    assert code == 124
    assert "the job stalled: rank 1 made no progress for" in said
    assert "[step 2, in 'data']" in said
    stacks = said.split("Stacks of rank")[1:]
    assert [text[1] for text in stacks] == ["0", "1"]
    assert "all_reduce" in stacks[0]
    assert "sleep_in_the_data_pipeline" in stacks[1]


@pytest.mark.dist
def test_a_launcher_that_is_told_to_stop_takes_its_processes_along(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nos.write(1, f'{os.getpid()}\\n'.encode())\ntime.sleep(1000)\n")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "windlass", "launch", "--cpu", "--num_processes", "2", str(script)],
        env={**os.environ, "WINDLASS_HOME": "/nowhere"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    try:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        # The pipe ends when the last process that holds it has gone.
        launcher.communicate(timeout=60)
    finally:
        end_all(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in pids if "waits.py" in _command_of(pid)]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_wrong_configuration_starts_nothing_and_names_every_problem(tmp_path: Path) -> None:
    flags = ("--engine", "boat", "--mixed_precision", "fp12", "--num_processes", "0")
    code, said = windlass("launch", *flags, tmp_path / "missing.py")
    assert code == 2
    for word in ("--engine='boat'", "--mixed_precision='fp12'", "--num_processes=0", "missing.py"):
        assert word in said


def test_a_job_can_be_shown_without_starting_it() -> None:
    code, said = windlass("launch", "--cpu", "--num_processes", 2, "--print", SCRIPT, "raises")
    assert code == 0
    assert f"windlass.cli.launching.worker {SCRIPT} raises" in said
    assert "WINDLASS_PARALLEL=" in said
    assert "# 2 process(es) on this machine, 2 in all" in said


@pytest.mark.dist
def test_processes_do_not_get_the_secret_of_the_launchers(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text("import os\nprint('secret:', 'WINDLASS_RDZV_TOKEN' in os.environ)")
    environ = {"WINDLASS_HOME": "/nowhere", "WINDLASS_RDZV_TOKEN": "only-launchers-need-this"}
    for how in ([], ["--no_python", sys.executable]):
        words = ("launch", "--cpu", "--num_processes", 1, *how, script)
        code, said = end_of("windlass", *words, timeout=120, environ=environ)
        assert (code, said.count("secret: False")) == (0, 1), said


@pytest.mark.dist
@pytest.mark.parametrize("how", ["exits", pytest.param("vanishes", marks=pytest.mark.slow)])
def test_a_rank_that_ends_before_it_joins_is_named_and_the_others_are_ended(how: str) -> None:
    script = SCRIPT.with_name("early_ranks.py")
    code, said = windlass("launch", "--cpu", "--num_processes", 3, script, how, timeout=100)
    assert code == 1
    assert (
        "rank 1 ended with exit code 0 before it joined the process group, and rank 0, 2 waited for it"
        in said
    )
