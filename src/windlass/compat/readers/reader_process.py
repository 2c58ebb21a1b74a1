"""Requests to the process that reads files of `torch.save` (see `torch_reader`).

The first request starts the process, which ends if none follows for some seconds. It is a new interpreter: nothing is
forked from this process, which may have threads and devices.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint import strict_json
from windlass.compat.readers import torch_reader
from windlass.core.errors import CheckpointError


class _ReadingProcess:
    """A process that reads files."""

    def __init__(self) -> None:
        # -P: the folder of that file is not one of modules. It finds torch where this process did.
        command = [sys.executable, "-P", torch_reader.__file__, str(Path(torch.__file__).parents[1])]
        # It forks for each file, and threads and devices do not survive a fork.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._channel, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                command, stdin=other.fileno(), stdout=subprocess.DEVNULL, env=environment
            )

    def ask(self, file: FileIO, kind: bytes) -> tuple[bytes, bytes]:
        """Return the two lines of the answer about an open file; empty ones if the process has ended."""
        incoming, outgoing = os.pipe()
        with open(incoming, "rb") as answer:
            try:
                socket.send_fds(self._channel, [kind], [file.fileno(), outgoing])
            except OSError:
                return b"", b""
            finally:
                os.close(outgoing)
            # Not up to the end of the pipe: a process that another thread forks meanwhile keeps it open.
            return answer.readline(torch_reader.MAX_ANSWER + 10_000), answer.readline(10_000)

    def close(self) -> None:
        """End the process, and wait for it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_lock = threading.Lock()
_running: list[_ReadingProcess] = []


def describe(file: FileIO, path: Path, *, objects: bool) -> Any:
    """Return the description of the content of an open file (see `torch_reader`). Raises CheckpointError if the file
    has another content, is damaged, or takes too much memory or time.

    Args:
        objects: its content may have objects beside plain values; none is created.
    """
    description, ended = _answer(file, torch_reader.OBJECTS if objects else torch_reader.PLAIN)
    reason = (
        ended.decode("ascii", "replace").strip() if ended else "the process that reads such files has ended"
    )
    if reason:
        raise CheckpointError(f"{path} cannot be read: {reason}")
    found = strict_json.parse(description, str(path), allow_nan=True)
    if isinstance(found, dict) and "error" in found:
        raise CheckpointError(f"{path} cannot be read: {str(found['error'])[:1000]}")
    return found


def _answer(file: FileIO, kind: bytes) -> tuple[bytes, bytes]:
    """The lines of the running process, or of a new one if that has ended meanwhile."""
    if not hasattr(socket, "send_fds"):
        raise CheckpointError(
            f"files of torch.save can't be read on {sys.platform}: it has no limits of memory and time. Convert them: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    with _lock:
        found = _running[0].ask(file, kind) if _running else (b"", b"")
        if not any(found):
            _close()
            _running.append(_ReadingProcess())
            found = _running[0].ask(file, kind)
        return found


def _close() -> None:
    while _running:
        _running.pop().close()


def _renew_lock() -> None:
    """In a fork: a thread that held the lock does not exist there. The fork may use the running process."""
    global _lock
    _lock = threading.Lock()


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
