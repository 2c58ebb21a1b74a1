"""Ranks of which one keeps the others waiting as its arguments say; waits are reported after two seconds."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch

from windlass.core.world import world_from_environment
from windlass.dist.beacon import beacon, limited_wait, waiting
from windlass.dist.gang import join

how = sys.argv[1]
gang = join(world_from_environment(), torch.device("cpu"), float(sys.argv[2]))
late = gang.rank == gang.size - 1
gang.barrier()
beacon().call("update", 3)
# Both are in the same call with the same marks: only the collectives that were issued tell who is late.
with waiting("forward and backward"):
    if late and how == "native":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second holds the GIL for good: no signal ends it, as it would end a sleep
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    if late and how == "sleeps":
        time.sleep(1000)
    if late and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    torch.distributed.all_reduce(torch.ones(1)) if gang.size > 1 else None
with limited_wait("read data"):
    time.sleep(1000 if how == "data" else 0)
