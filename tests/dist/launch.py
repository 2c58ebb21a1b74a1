"""Starts real processes that meet over gloo, as a user would, and fails with what they said when one of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(world: int, script: Path, *arguments: object, timeout: float = 200, expect: int = 0) -> str:
    """Run `script` in `world` processes of torch's launcher; gives what they printed, on either stream."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == (expect == 0), f"exit code {done.returncode}\n{said[-6000:]}"
    return said
