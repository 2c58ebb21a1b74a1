"""Starts real processes that meet over gloo, as a user would, and fails with what they said when one of them fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def launch(world: int, script: Path, *arguments: object, timeout: float = 200, expect: int = 0) -> str:
    """Run `script` on `world` ranks, forked from a process that has imported everything; gives what they printed, on
    either stream.
    """
    codes, text = _run(world, script, arguments, ROOT, timeout)
    assert (not any(codes)) == (expect == 0), f"exit codes {codes}\n{text[-6000:]}"
    return text


def run_script(
    script: Path, *arguments: object, cwd: Path = ROOT, timeout: float = 200, expect: int = 0
) -> str:
    """Run `script` as `python` would, in a fork of the same process; gives what it printed, on either stream."""
    codes, text = _run(0, script, arguments, cwd, timeout)
    assert codes == [expect], f"exit code {codes[0]}\n{text[-6000:]}"
    return text


def _run(
    world: int, script: Path, arguments: Sequence[object], cwd: Path, timeout: float
) -> tuple[list[int], str]:
    """Exit code of each rank, negative for a signal, and everything printed."""
    with tempfile.TemporaryDirectory(prefix="windlass-ranks-") as folder:
        said = Path(folder) / "said.txt"
        said.touch()
        request = {
            "world": world,
            "script": str(script),
            "arguments": [str(argument) for argument in arguments],
            "said": str(said),
            "environ": _environment(),
            "cwd": str(cwd),
            "timeout": timeout,
        }
        answer = _server().ask(request)
        text = said.read_text("utf-8", "replace")
    assert not answer["late"], f"not done after {timeout} s\n{text[-6000:]}"
    return answer["codes"], text


class _RankServer:
    """A running `tests.dist.rank_server`, which ends with this process: its standard input does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.rank_server"],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the server of ranks ended with code {self._process.wait()}"
        found: dict[str, Any] = json.loads(answer)
        return found


@functools.cache
def _server() -> _RankServer:
    return _RankServer()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


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
        env={**_environment(), **(environ or {})},
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
