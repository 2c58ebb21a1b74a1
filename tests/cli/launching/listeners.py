"""Which addresses a process listens on, read from the kernel's own tables."""

from __future__ import annotations

import os
from pathlib import Path


def listening(pid: int | str = "self") -> set[str]:
    """Local addresses (hexadecimal, as in /proc/net/tcp) of the listening sockets of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].rpartition(":")[0])
    return found


def only_loopback(addresses: set[str]) -> bool:
    """127.0.0.0/8, ::1 and ::ffff:127.0.0.0/104 as the kernel writes them on a little-endian machine."""
    return all(
        (len(a) == 8 and a.endswith("7F"))
        or a == "00000000000000000000000001000000"
        or (a.startswith("0000000000000000FFFF0000") and a.endswith("7F"))
        for a in addresses
    )  # fmt: skip
