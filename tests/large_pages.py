"""Large pages for what this process holds, so that forking it is cheap.

A fork copies the page table, and the end of the child takes the copy apart: about 60 microseconds for each MiB that the
process holds. Test processes hold hundreds, and fork more than a thousand times. In pages of 2 MiB instead of 4 KiB it
takes a fifth of the time. It does not last: where this process writes to a large page while a child lives, the system
divides it for both, and every count of references is such a write.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; an older kernel refuses it, and all stays as it was
_FORKS = 10  # to put divided pages together takes as long as a few forks of them

# Forks of this process since then; None in a child, where it would copy what the parent shares.
_forks: int | None = None


def keep_large_pages() -> None:
    """Move this process's own memory into large pages, now and again before every tenth fork."""
    global _forks
    _use_large_pages()
    _forks = 0


def _before_fork() -> None:
    global _forks
    if _forks is None:
        return
    _forks += 1
    if _forks == _FORKS:
        _forks = 0
        _use_large_pages()


def _forget() -> None:
    global _forks
    _forks = None


os.register_at_fork(before=_before_fork, after_in_child=_forget)


def _use_large_pages() -> None:
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split()
        if rights != "rw-p" or inode != "0":
            continue  # a file, or shared with others
        start, end = (int(edge, 16) for edge in span.split("-"))
        for address in range(-(-start // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE):
            advise(address, _SIZE, _COLLAPSE)
