"""Worlds of real processes that meet over a file, forked from one that has imported everything: a launch imports torch
once more for every rank, these do not.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def in_a_world(size: int, meeting: Path, work: Callable[[], None]) -> None:
    """Do `work` on every rank of a world, each a child of this process, which must have no threads yet.

    Args:
        meeting: a file that is not there, on which the ranks meet; unused in a world of one.

    Raises:
        AssertionError: a rank failed; what it said is on its standard error.
    """
    children = [_fork(rank, size, meeting, work) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"exit codes of {size} rank(s): {codes}"


def _fork(rank: int, size: int, meeting: Path, work: Callable[[], None]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        if size > 1:
            where, limit = f"file://{meeting}", timedelta(seconds=60)
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
