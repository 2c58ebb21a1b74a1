"""Which process this is, in a form by which another process finds out later whether it still runs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_LARGEST_PID = 2**31 - 1  # what the system's calls take


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine."""

    host: str  # name of the machine, for people
    boot: str | None  # the kernel's random id of this boot; None if the system has none
    namespace: str | None  # the namespace that `pid` counts in: containers of one machine have several
    pid: int  # process id
    # Start of the process in clock ticks since boot, which tells it from a later one with the same pid; None if
    # unknown
    started: int | None

    @classmethod
    def current(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), _pid_namespace(), pid, _start_of(pid))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | None:
        """Read what another process wrote; None if it is not an identity."""
        texts = [values.get(name) for name in ("host", "boot", "namespace")]
        pid, started = values.get("pid"), values.get("started")
        if not isinstance(texts[0], str) or any(not isinstance(text, str | None) for text in texts):
            return None
        if (
            type(pid) is not int
            or not 1 <= pid <= _LARGEST_PID
            or not (started is None or type(started) is int)
        ):
            return None
        return cls(texts[0], texts[1], texts[2], pid, started)

    def runs(self) -> bool | None:
        """Return whether this process is still alive; None if it cannot be looked up from here.

        A stopped process (SIGSTOP) is alive; one that was killed and not yet reaped by its parent is not.
        """
        if self.boot is None or self.boot != _boot_id() or self.started is None:
            return None
        if self.namespace is None or self.namespace != _pid_namespace():
            return None
        started = _start_of(self.pid)
        return _exists_unseen(self.pid) if started is None else started == self.started


def process_age() -> float | None:
    """Return the seconds since this process started; None if the system does not show it."""
    started = _start_of(os.getpid())
    if started is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"), 0.0)


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return None


def _pid_namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def _start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (proc(5), field 22 of `stat`); None if there is no live one."""
    folder = Path("/proc", str(pid))
    try:
        # The second field, the command in parentheses, may itself hold spaces and parentheses.
        fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        # A process whose first thread has returned looks dead while other threads run on.
        if fields[0] in "ZX" and len(os.listdir(folder / "task")) <= 1:
            return None
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _exists_unseen(pid: int) -> bool | None:
    """Whether a process that /proc does not show is alive: a system may hide other users' there (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return None
    except OSError:
        return False
    return False  # this user's: what /proc does not show of it is a zombie
