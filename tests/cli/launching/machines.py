"""Two machines on one: network namespaces joined by a cable of their own, or two loopback addresses without them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineHere:
    """`prefix` goes before a command to run it there; `address` is where the other reaches it."""

    prefix: tuple[str, ...]
    address: str


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@contextmanager
def two_machines() -> Iterator[list[MachineHere]]:
    """Both, for as long as the context lasts."""
    with ExitStack() as undo:
        try:
            machines = _namespaces(undo)
        except (OSError, subprocess.SubprocessError):
            machines = [MachineHere((), "127.0.0.1"), MachineHere((), "127.0.0.2")]
        yield machines


def _namespaces(undo: ExitStack) -> list[MachineHere]:
    number = os.getpid() % 60000
    cables, machines = [f"wl{number}a", f"wl{number}b"], []
    for index, cable in enumerate(cables):
        name = f"windlass-{number}-{index}"
        _run("ip", "netns", "add", name)
        undo.callback(_run, "ip", "netns", "del", name)
        machines.append(
            MachineHere(("ip", "netns", "exec", name), f"10.{number // 250}.{number % 250}.{index + 1}")
        )
        if index == 0:
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", cables[1])
        _run("ip", "link", "set", cable, "netns", name)
        for words in (
            f"addr add {machines[-1].address}/24 dev {cable}", f"link set {cable} up", "link set lo up",
        ):  # fmt: skip
            _run("ip", "-n", name, *words.split())
    return machines
