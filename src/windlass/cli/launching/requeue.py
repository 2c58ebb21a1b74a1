"""Starting a job again that left because a scheduler wanted the machine back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from windlass.cli.launching.failure_report import say
from windlass.config.launch_checks import SLURM_JOB_VARIABLE

# How often Slurm has started this job again; absent at first.
_COUNT_VARIABLE = "SLURM_RESTART_COUNT"
_PATIENCE_SECONDS = 60


class Requeue:
    """Starts a job again: through Slurm's queue where the job came from one, else in place.

    Args:
        limit: how often; None without a limit.
        environ: of this process.
    """

    def __init__(self, limit: int | None, environ: Mapping[str, str] | None = None) -> None:
        self._limit = limit
        environ = os.environ if environ is None else environ
        self._job = environ.get(SLURM_JOB_VARIABLE)
        said = environ.get(_COUNT_VARIABLE, "")
        self._done = int(said) if self._job is not None and said.isdecimal() else 0

    def starts_here(self, told: bool, machine_rank: int = 0) -> bool:
        """Whether the launcher is to start the job anew itself, now; a line says what happens.

        Under Slurm it is not: machine 0 puts the job back into the queue. Nor where the launcher was told to stop:
        whoever did that wants it gone, and finds the exit code.
        """
        if machine_rank != 0 or (self._job is None and told):
            return False
        if self._limit is not None and self._done >= self._limit:
            say(f"the job has been started again {self._done} time(s), as often as --max_requeues allows")
            return False
        if self._job is not None:
            _put_back(self._job)
            return False
        self._done += 1
        say(f"starting the job again ({self._done}{'' if self._limit is None else f' of {self._limit}'})")
        return True


def _put_back(job: str) -> None:
    """Ask for the job to be queued again; a refusal is said, and changes nothing else."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    say(f"job {job} is queued again" if problem is None else f"{' '.join(command)} failed: {problem}")
