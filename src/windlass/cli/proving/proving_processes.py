"""The processes of trials: forked from one process that has imported everything, and ended with the command."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from windlass.cli.proving.small_training import OUTPUT, REPORT, SmallTraining

_PRELOADED = (
    "windlass.cli.proving.proving_rank",
    "windlass.trainer.preparation",
    "windlass.trainer.run",
    "windlass.trainer.services",
    "windlass.finetuning.sft_trainer",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "windlass.transforms.strategies",
    "windlass.transforms.context",
    "windlass.transforms.tensor_parallel",
)
# Seconds until ranks are ended that have lost a peer, and all that take too long: a layout may make them wait.
_GRACE, LIMIT = 5.0, 180.0


class EndedTraining:
    """How the processes of a trial ended.

    Attributes:
        folder: the files that they left.
        reports: what each of them reported; empty for one that was killed.

    Args:
        codes: exit codes by rank, of those that ended by themselves.
    """

    def __init__(self, trial: SmallTraining, folder: Path, codes: dict[int, int]) -> None:
        self.trial, self.folder, self._codes = trial, folder, codes
        self.reports = [_read(folder / REPORT.format(rank)) for rank in range(trial.layout.processes)]

    @property
    def refused(self) -> str | None:
        """Why the layout is refused; None if it is not."""
        return self._first("refused")

    @property
    def failed(self) -> str | None:
        """What went wrong; None if all ranks trained."""
        for rank, code in self._codes.items():  # without a report: the others failed because they lost it
            if not self.reports[rank]:
                return f"rank {rank} ended with exit code {code}\n{self._printed(rank)}".rstrip()
        if (error := self._first("failed")) is not None:
            return error
        if len(self._codes) < len(self.reports):
            return f"the processes did not end within {LIMIT:.0f} s: some of them wait for the others"
        return None

    def _first(self, key: str) -> str | None:
        """The text of the rank that wrote it first: others fail because they lose it."""
        found = [
            ((self.folder / REPORT.format(rank)).stat().st_mtime_ns, str(report[key]))
            for rank, report in enumerate(self.reports)
            if key in report
        ]
        return min(found)[1] if found else None

    def _printed(self, rank: int) -> str:
        path = self.folder / OUTPUT.format(rank)
        return path.read_text("utf-8", "replace")[-2000:] if path.is_file() else ""


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return report


class StartedTraining:
    """The processes of one trial, which run. `folder` must be empty."""

    def __init__(self, context: Any, trial: SmallTraining, folder: Path) -> None:
        folder.mkdir()
        self._trial, self._folder = trial, folder
        port = _free_port()
        self.processes: list[BaseProcess] = [
            context.Process(target=_run, args=(trial, rank, port, str(folder)), daemon=True)
            for rank in range(trial.layout.processes)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> EndedTraining:
        """Wait for the end of all of them. Those that are left when one failed are ended."""
        end = time.monotonic() + LIMIT
        codes: dict[int, int] = {}
        while alive := [process for process in self.processes if process.is_alive()]:
            left = end - time.monotonic()
            if left <= 0:
                break
            connection.wait([process.sentinel for process in alive], timeout=left)
            codes = self._codes()
            if any(codes.values()):
                end = min(end, time.monotonic() + _GRACE)
        codes = self._codes()
        self.end()
        return EndedTraining(self._trial, self._folder, codes)

    def _codes(self) -> dict[int, int]:
        """Exit codes by rank, of those that ended."""
        found = ((rank, process.exitcode) for rank, process in enumerate(self.processes))
        return {rank: code for rank, code in found if code is not None}

    def end(self) -> None:
        """Kill those that are left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


def _run(trial: SmallTraining, rank: int, port: int, folder: str) -> None:
    """In a process of a trial; the command itself does not need these imports."""
    from windlass.cli.proving.proving_rank import run_rank

    run_rank(trial, rank, port, folder)


class ProvingProcesses:
    """Starts trials.

    Args:
        folder: for their files.
        module: of the model, imported once for all processes.
    """

    def __init__(self, folder: Path, module: str) -> None:
        self._folder, self._count = folder, 0
        self._started: list[StartedTraining] = []
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            from multiprocessing import forkserver

            # A process with threads must not be forked: libraries start none if the environment allows one.
            with _one_thread(), _quiet_errors(folder / "server.txt"):
                self._context.set_forkserver_preload([*_PRELOADED, module])
                forkserver.ensure_running()

    def start(self, trial: SmallTraining) -> StartedTraining:
        """Start the processes of a trial."""
        self._count += 1
        self._started.append(StartedTraining(self._context, trial, self._folder / str(self._count)))
        return self._started[-1]

    def close(self) -> None:
        """Kill everything that still runs."""
        for started in self._started:
            started.end()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def _quiet_errors(path: Path) -> Iterator[None]:
    """What a process that is started within prints to standard error goes to a file: warnings of its imports."""
    sys.stderr.flush()
    before = os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
