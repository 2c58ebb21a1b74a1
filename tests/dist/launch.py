"""Starts real processes that meet over gloo, as a user would, and fails with what they said when one of them fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(world: int, script: Path, *arguments: object, timeout: float = 200, expect: int = 0) -> str:
    """Run `script` in `world` processes of torch's launcher; gives what they printed, on either stream."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    code, said = run_to_its_end([*command, str(script), *map(str, arguments)], timeout=timeout)
    assert (code == 0) == (expect == 0), f"exit code {code}\n{said[-6000:]}"
    return said


def run_to_its_end(
    command: Sequence[str], *, timeout: float, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and everything printed. Nothing that it started is left where it takes too long.

    A launcher that is killed cannot end its processes, which lead sessions of their own: each has to be found.

    Raises:
        TimeoutExpired: with what was printed until then.
    """
    job = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = job.communicate(timeout=timeout)
    except BaseException:
        end_all(job)
        raise
    return job.returncode, said


def end_all(job: subprocess.Popen[str]) -> None:
    """Kill a job that still runs, and everything that it started."""
    if job.poll() is not None:
        return
    for pid in [job.pid, *started_by(job.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.communicate()


def started_by(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and theirs, the youngest generation first."""
    for children in list(Path(f"/proc/{pid}/task").glob("*/children")):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from started_by(int(child))
                yield int(child)
