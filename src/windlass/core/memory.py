"""How much memory the host has left."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping, within the limits of the container; None where nothing tells
    (other systems than Linux).
    """
    known = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _of_container() -> int | None:
    """Of a version 2 control group: its limit, less what it holds that cannot be given back."""
    try:
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text("ascii"))
        stats = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        return max(int(limit) - used + int(stats.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None
