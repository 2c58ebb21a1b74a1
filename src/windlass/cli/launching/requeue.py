"""Starting a job again that left because a scheduler wanted the machine back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

_JOB_VARIABLE = "SLURM_JOB_ID"
_PATIENCE_SECONDS = 60


def starts_again_here(told: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher is to start the job anew itself.

    Under Slurm it is not: the job goes back into the queue. Nor where the launcher was told to stop: whoever did that
    wants it gone, and finds the exit code.
    """
    return not told and _JOB_VARIABLE not in (os.environ if environ is None else environ)


def back_into_the_queue(environ: Mapping[str, str] | None = None) -> None:
    """Under Slurm, ask for the job to be queued again; a refusal is said, and changes nothing else."""
    job = (os.environ if environ is None else environ).get(_JOB_VARIABLE)
    if job is None:
        return
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        problem = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    said = f"job {job} is queued again" if problem is None else f"scontrol requeue {job} failed: {problem}"
    print(f"windlass launch: {said}", file=sys.stderr)
