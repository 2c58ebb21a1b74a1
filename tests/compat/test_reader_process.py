"""Requests to the process that reads files of `torch.save`, from a process with threads and from its forks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch

from windlass.checkpoint.files import Files
from windlass.compat.readers.reader_process import _ReadingProcess
from windlass.compat.readers.torch_file import open_torch_file


def read(path: Path) -> list[int]:
    with open_torch_file(path, Files()) as file:
        tree: list[int] = file.tree
    return tree


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_reads_while_another_thread_of_its_parent_was_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    torch.save([1, 2], path)
    assert read(path) == [1, 2]  # the process runs
    ask, asks, go_on = _ReadingProcess.ask, threading.Event(), threading.Event()

    def waiting(self: _ReadingProcess, file: object, kind: bytes) -> tuple[bytes, bytes]:
        asks.set()
        go_on.wait(60)
        return ask(self, file, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(_ReadingProcess, "ask", waiting)
    reading = threading.Thread(target=read, args=[path])
    reading.start()
    asks.wait(60)
    monkeypatch.undo()
    child = os.fork()
    if not child:
        signal.alarm(60)  # which ends a child that waits for the lock
        code = 1
        try:
            code = 0 if read(path) == [1, 2] else 2
        finally:
            os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go_on.set()
        reading.join()
    assert read(path) == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_that_keeps_the_pipe_of_an_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, send, children = tmp_path / "x.pt", socket.send_fds, list[int]()
    torch.save([1, 2], path)

    def forking(*arguments: object) -> int:
        """As another thread may do, which starts workers: the child has what is open now."""
        children.append(os.fork())
        if not children[-1]:
            signal.pause()
        return send(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "send_fds", forking)
    found: list[list[int]] = []
    reading = threading.Thread(target=lambda: found.append(read(path)), daemon=True)
    reading.start()
    reading.join(60)
    while_it_lived = list(found)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert while_it_lived == [[1, 2]]
