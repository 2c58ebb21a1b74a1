"""A process that is to be forked waits for threads that Python did not start."""

from __future__ import annotations

import _thread
import gc
import hashlib
import sys
import threading
from typing import Any

from tests.data.cases import end_in_a_minute
from tests.trainer.resume_cases import in_a_child

from windlass.core.threads import wait_for_foreign_threads


def test_a_thread_that_python_did_not_start_is_waited_for() -> None:
    """`_thread` starts threads that `threading` does not know; hashing runs beside us."""
    data, ended = bytes(1 << 20), _thread.allocate_lock()
    stop: list[bool] = []
    ended.acquire()

    def work() -> None:
        while not stop:
            hashlib.sha256(data)
        ended.release()

    _thread.start_new_thread(work, ())
    assert not wait_for_foreign_threads(patience=0.0) or not wait_for_foreign_threads(patience=0.0)
    stop.append(True)
    ended.acquire()
    assert wait_for_foreign_threads(patience=60.0)


class WaitsForAThread:
    """Garbage that waits for the end of a thread, which it asks for."""

    def __init__(self) -> None:
        self._asked, self._cycle = threading.Event(), self
        self._thread = threading.Thread(target=self._asked.wait, daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        self._asked.set()
        self._thread.join()


def test_garbage_that_waits_for_a_thread_is_not_collected_while_threads_are_listed() -> None:
    code = threading.enumerate.__code__
    with_its_lock = max(line for *_, line in code.co_lines() if line is not None)

    def collect(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if frame.f_lineno == with_its_lock and gc.isenabled():  # as the collector may at any allocation
            gc.collect()
        return collect

    def work() -> None:
        end_in_a_minute()
        WaitsForAThread()
        sys.settrace(collect)
        wait_for_foreign_threads()
        sys.settrace(None)
        assert gc.isenabled()

    assert in_a_child(work) == 0
