"""Two machines on one: network namespaces joined by a cable of their own, or two loopback addresses without them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.dist.launch import ROOT, end_all


@dataclass(frozen=True)
class MachineHere:
    """`prefix` goes before a command to run it there; `address` is where the other reaches it."""

    prefix: tuple[str, ...]
    address: str


def free_port() -> int:
    """A port that no program listens on."""
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


def launch_on_both(*words: object) -> tuple[list[int], list[str]]:
    """Exit codes of `windlass launch` on both machines and what they said: of machine 1 first, which has to wait for
    the main machine.
    """
    port = free_port()
    with two_machines() as machines:
        jobs = [launch_one(machines[rank], rank, machines[0].address, port, *words) for rank in (1, 0)]
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                end_all(job)
    return [job.returncode for job in jobs], said


def launch_one(
    machine: MachineHere, rank: int, main: str, port: int, *words: object
) -> subprocess.Popen[str]:
    """Start `windlass launch` on one machine, with a token."""
    flags = [
        "--cpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", rank,
        "--main_process_ip", main, "--main_process_port", port,
    ]  # fmt: skip
    return start_there(machine, *flags, *words, environ={"WINDLASS_RDZV_TOKEN": "of-two-test-machines"})


def start_there(
    machine: MachineHere, *words: object, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `windlass launch` with these words alone."""
    command = [*machine.prefix, sys.executable, "-m", "windlass", "launch", *words]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WINDLASS_HOME": "/nowhere"}
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **settings, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
