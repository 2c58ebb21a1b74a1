"""Restart a job that saved and exited because a scheduler preempted it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from windlass.cli.launching.failure_report import say
from windlass.cli.launching.launch_checks import SLURM_JOB_VARIABLE

# How often Slurm has restarted this job; not set in the first run.
_COUNT_VARIABLE = "SLURM_RESTART_COUNT"
_TIMEOUT_SECONDS = 60


class Requeue:
    """Restarts a job: through Slurm's queue if the job came from one, else in place.

    Args:
        limit: the maximum number of restarts; None for no limit.
        environ: of this process.
    """

    def __init__(self, limit: int | None, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._limit = limit
        self._job = environ.get(SLURM_JOB_VARIABLE)
        count = environ.get(_COUNT_VARIABLE, "")
        self._done = int(count) if self._job is not None and count.isdecimal() else 0

    def restarts_here(self, signalled: bool, machine_rank: int = 0) -> bool:
        """Return True if the launcher is to restart the job itself, now.

        False under Slurm, where machine 0 puts the job back into the queue, and if the launcher itself was signalled:
        the sender wants it gone, and receives the exit code.
        """
        if machine_rank != 0 or (self._job is None and signalled):
            return False
        if self._limit is not None and self._done >= self._limit:
            say(f"the job has been restarted {self._done} time(s), the maximum of --max_requeues")
            return False
        if self._job is not None:
            _put_back(self._job)
            return False
        self._done += 1
        say(f"restarting the job ({self._done}{'' if self._limit is None else f' of {self._limit}'})")
        return True


def _put_back(job: str) -> None:
    """Ask Slurm to queue the job again; a refusal is reported and nothing else."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    say(f"job {job} is queued again" if problem is None else f"{' '.join(command)} failed: {problem}")
