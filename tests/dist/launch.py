"""Starts real processes that meet over gloo, as a user would, and fails with what they said when one of them fails."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.cli.launching.launch import resolve_launch
from windlass.cli.launching.launch_flags import add_launch_flags
from windlass.cli.launching.worker_environment import worker_environment

ROOT = Path(__file__).resolve().parents[2]


def launch(
    world: int,
    script: Path | str,
    *arguments: object,
    timeout: float = 200,
    expect: int = 0,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> str:
    """Run a script, or a module given by its name, on `world` ranks, forked from a process that has imported
    everything; return what they printed, on either stream.
    """
    codes, text = _run(world, script, arguments, cwd, timeout, environ or {})
    assert (not any(codes)) == (expect == 0), f"exit codes {codes}\n{text[-6000:]}"
    return text


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 200,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a function of a module of tests on `world` ranks, forked as those of `launch`; return what it returned on
    each, in rank order, as JSON has it. A world of 0 is one process without the variables of a launcher.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-called-") as folder:
        call = Path(folder, "call")
        codes, text = _call(world, function, arguments, call, timeout, environ or {})
        assert not any(codes), f"exit codes {codes}\n{text[-6000:]}"
        return [json.loads(Path(f"{call}.{rank}").read_text()) for rank in range(len(codes))]


def failure_on_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 200,
    environ: Mapping[str, str] | None = None,
) -> str:
    """As `on_ranks`, of a call that fails on a rank; return what they printed, on either stream."""
    with tempfile.TemporaryDirectory(prefix="windlass-called-") as folder:
        codes, text = _call(world, function, arguments, Path(folder, "call"), timeout, environ or {})
        assert any(codes), f"no rank failed\n{text[-6000:]}"
        return text


def launch_as(*words: object, timeout: float = 200, cwd: Path = ROOT) -> str:
    """Run on forked ranks what `windlass launch` with these words starts on this machine, with the variables that it
    hands on: for tests of what is started. Gives what was printed on either stream.
    """
    parser = argparse.ArgumentParser()
    add_launch_flags(parser)
    plan = resolve_launch(parser.parse_args([str(word) for word in words]), os.environ)
    script, environ = Path(plan.script), worker_environment(plan)
    return launch(plan.processes, script, *plan.arguments, timeout=timeout, environ=environ, cwd=cwd)


def run_script(
    script: Path | str,
    *arguments: object,
    cwd: Path = ROOT,
    timeout: float = 200,
    expect: int = 0,
    environ: Mapping[str, str] | None = None,
) -> str:
    """As `end_of`, and fails where the exit code is not `expect`; return what was printed."""
    code, text = end_of(script, *arguments, cwd=cwd, timeout=timeout, environ=environ)
    assert code == expect, f"exit code {code}\n{text[-6000:]}"
    return text


def end_of(
    script: Path | str,
    *arguments: object,
    cwd: Path = ROOT,
    timeout: float = 200,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a file as `python` would, or a module, given by its name, as `python -m` would, in a fork of a process that
    has imported everything; return its exit code, negative for a signal, and what it printed on either stream.
    """
    (code,), text = _run(0, script, arguments, cwd, timeout, environ or {})
    return code, text


class Started:
    """A script that runs, in a fork of the same process; killed at the end of the `with` block.

    Attributes:
        pid: of its process, which leads a session.
        stdin: what it reads, line by line.
        stdout: what it prints, on either stream.
    """

    def __init__(
        self,
        script: Path | str,
        *arguments: object,
        cwd: Path = ROOT,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-started-")
        told, said = (Path(self._folder.name) / name for name in ("told", "said"))
        os.mkfifo(told)
        os.mkfifo(said)
        request = _request(script, arguments, said, cwd, environ or {})
        self._code: int | None = None  # once its end was waited for
        self.pid: int = _server().ask({**request, "told": str(told)})["pid"]
        # Each waits for the other side, which opens them in this order.
        self.stdin, self.stdout = told.open("w", buffering=1), said.open(errors="replace")

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.end()
        self._folder.cleanup()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Close its input and wait for its end; return its exit code, negative for a signal, and what it printed."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        rest = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        if self._code is None:
            self._code = _server().ask({"wait": self.pid})["code"]
        return self._code, rest


def started_on(
    terminal: str,
    script: Path | str,
    *arguments: object,
    cwd: Path,
    environ: Mapping[str, str],
) -> tuple[int, Callable[[], int]]:
    """Start a script in a fork of the same process, on the terminal of this name; return its process, and a wait for
    its exit code.
    """
    request = _request(script, arguments, terminal, cwd, environ)
    pid: int = _server().ask({**request, "told": terminal})["pid"]
    return pid, lambda: _server().ask({"wait": pid})["code"]


def end_of_ranks(
    world: int,
    terminal: str,
    script: Path,
    *arguments: object,
    cwd: Path,
    environ: Mapping[str, str],
    timeout: float,
) -> int:
    """Run `script` on `world` ranks that write to the terminal of this name; return the largest exit code."""
    request = _request(script, arguments, terminal, cwd, environ)
    answer = _server().ask({**request, "world": world, "timeout": timeout})
    assert not answer["late"], f"not done after {timeout} s"
    return max(answer["codes"], key=abs)


def _request(
    script: Path | str, arguments: Sequence[object], said: Path | str, cwd: Path, environ: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "script": str(script),
        "is_module": isinstance(script, str),
        "arguments": [str(argument) for argument in arguments],
        "said": str(said),
        "environ": {**_environment(), **_FORKED, **environ},
        "cwd": str(cwd),
    }


def _call(
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    call: Path,
    timeout: float,
    environ: Mapping[str, str],
) -> tuple[list[int], str]:
    """Write the call into a file for the ranks; return what `_run` does."""
    call.write_bytes(pickle.dumps((function, arguments)))
    return _run(world, "tests.dist.rank_server", (), ROOT, timeout, environ, {"call": str(call)})


def _run(
    world: int,
    script: Path | str,
    arguments: Sequence[object],
    cwd: Path,
    timeout: float,
    environ: Mapping[str, str],
    more: Mapping[str, str] | None = None,
) -> tuple[list[int], str]:
    """Exit code of each rank, negative for a signal, and everything printed."""
    with tempfile.TemporaryDirectory(prefix="windlass-ranks-") as folder:
        said = Path(folder) / "said.txt"
        said.touch()
        request = _request(script, arguments, said, cwd, environ)
        answer = _server().ask({**request, **(more or {}), "world": world, "timeout": timeout})
        text = said.read_text("utf-8", "replace")
    assert not answer["late"], f"not done after {timeout} s\n{text[-6000:]}"
    return answer["codes"], text


class _RankServer:
    """A running `tests.dist.rank_server`, which ends with this process: its standard input does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.rank_server"],
            cwd=ROOT,
            env={**_environment(), **_FORKED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BaseException:
            # Interrupted, as by the time limit of a test: the next request would read the answer to this one.
            _server.cache_clear()
            end_all(self._process)
            raise
        assert answer, f"the server of ranks ended with code {self._process.wait()}"
        found: dict[str, Any] = json.loads(answer)
        return found


@functools.cache
def _server() -> _RankServer:
    return _RankServer()


# Forked ranks train on the processor: a process that has asked for an accelerator, as imports of some libraries do, has
# a thread, and cannot be forked with it.
_FORKED = {"CUDA_VISIBLE_DEVICES": ""}


def _environment() -> dict[str, str]:
    # Buffered: unbuffered, each word of a `print` is a write, and the lines of two ranks mix.
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return {**os.environ, **fixed}


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
