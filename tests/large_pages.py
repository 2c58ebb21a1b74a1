"""Large pages for what this process holds, so that forking it is cheap.

A fork copies the page table, and the end of the child takes the copy apart: about 60 microseconds for each MiB that the
process holds. Test processes hold hundreds, and fork more than a thousand times. In pages of 2 MiB instead of 4 KiB it
takes a fifth of the time.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; an older kernel refuses it, and all stays as it was


def use_large_pages() -> None:
    """Move this process's own memory into large pages. What it takes from the system later is not affected."""
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
