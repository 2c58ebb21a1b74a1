"""Threads of one process: how they wait for each other, how many there are, and whether cores are free for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.world import world_from_environment

logger = get_logger(__name__)

# Iterations that a thread of libgomp (PyTorch's OpenMP runtime on Linux) spins at the end of a parallel region before
# it sleeps: 0.1 to 0.3 ms. The regions of a training step follow each other faster than that, so on an idle machine a
# thread hardly ever sleeps. The default is a thousand times as long, which on a busy machine uses up the time slice
# that the thread waited for would need. Measured by benchmarks/contention.py.
SPIN_COUNT = 10_000
_SPIN_VARIABLE = "GOMP_SPINCOUNT"
# Any of these is a waiting policy of the user's own.
_POLICIES = (_SPIN_VARIABLE, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
# The name under which a checkpoint's manifest has the number of threads.
META_NAME = "threads"


def waiting_policy(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that let waiting threads sleep early; empty if `environ` has a policy already.

    They count for a process that loads PyTorch after they are set.
    """
    return {} if any(name in environ for name in _POLICIES) else {_SPIN_VARIABLE: str(SPIN_COUNT)}


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_and_threads(workers: int) -> int:
    """How many threads this job may run at once on this machine, if each of its processes has so many data workers."""
    import torch

    return world_from_environment().local_size * (torch.get_num_threads() + workers)


def thread_count() -> dict[str, int]:
    """Number of threads that split one operation on the CPU, for a checkpoint's manifest."""
    import torch

    return {META_NAME: torch.get_num_threads()}


def warn_of_other_threads(meta: Mapping[str, Any], device_type: str, folder: object) -> None:
    """Warn if a checkpoint was saved by a process with another number of threads: sums on the CPU are then split
    differently, so the last bits of a resumed run differ.
    """
    saved = meta.get(META_NAME)
    here = thread_count()[META_NAME]
    if device_type == "cpu" and saved is not None and saved != here:
        logger.warning(
            "%s was saved with %s thread(s) per process, this process has %d: sums are split differently, so results "
            "agree to rounding and not to the bit. Set OMP_NUM_THREADS=%s to continue with the same bits",
            folder, saved, here, saved,
        )  # fmt: skip


class LoadWatch:
    """Logs once per run, on the first process of each machine, that other programs use the cores.

    Args:
        own: processes and threads of this job on this machine that may be running while it trains.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._enabled = hasattr(os, "getloadavg") and world_from_environment().is_local_main

    def look(self, *, training: bool) -> None:
        """Compare the load average of the last minute with the cores.

        Args:
            training: the job itself has been running, so that its own threads are part of the load.
        """
        if not self._enabled:
            return
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        others = load - (self._own if training else 0)
        if others < 1 or load < cores + 1:
            return
        self._enabled = False
        logger.warning(
            "load average %.1f on %d core(s): other programs use the cores, so every step takes longer. "
            "%s", load, cores, _advice()
        )  # fmt: skip


def _advice() -> str:
    if os.environ.get("OMP_NUM_THREADS") == "1" or any(name in os.environ for name in _POLICIES):
        return "Run fewer programs at a time if that matters"
    return (
        f"Start the script with `windlass launch`, or with {_SPIN_VARIABLE}={SPIN_COUNT} in its environment: then its "
        "threads sleep while they wait for each other"
    )
