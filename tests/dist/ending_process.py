"""Run by a test: a process that ends while one of its threads is in a call of a store that does not answer.

The argument is the name of that thread. The store is in a process of its own, which is stopped; its id is printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from windlass.dist.beacon import limited_wait
from windlass.dist.watchdog import REPORT_VARIABLE, watch

WATCHED = {"RANK": "0", "WORLD_SIZE": "2", REPORT_VARIABLE: "0.1"}


def serve() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def thread_in_a_call(name: str) -> int:
    """Wait until the thread is in a call that does not return; its id in the system."""
    where, since = None, 0.0
    while True:
        time.sleep(0.005)
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident or 0)
            if thread.name == name and frame is not None:
                now = (frame.f_code.co_filename, frame.f_lasti)
                where, since = now, since if now == where else time.monotonic()
                if time.monotonic() - since > 0.5 and not now[0].endswith("threading.py"):
                    return thread.native_id or 0


class OutlivesModules:
    """Keeps the interpreter in its shutdown, when modules are gone, until the thread has ended."""

    def __init__(self, thread: int) -> None:
        self._entry = f"/proc/self/task/{thread}"
        self._exists, self._sleep, self._write = os.path.exists, time.sleep, os.write

    def __del__(self) -> None:
        self._write(1, b"the modules are gone\n")
        while self._exists(self._entry):
            self._sleep(0.01)


def main(name: str) -> None:
    global last
    command = [sys.executable, "-m", "tests.dist.ending_process", "serve"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if name == "windlass-watch-board":
        watch(WATCHED)
        while name not in {thread.name for thread in threading.enumerate()}:
            time.sleep(0.005)
    os.kill(server.pid, signal.SIGSTOP)
    watch(WATCHED)
    with limited_wait("read data"):  # marks of others are read by a process that waits
        last = OutlivesModules(thread_in_a_call(name))
    print(server.pid, flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(sys.argv[1])
