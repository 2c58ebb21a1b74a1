"""A process that is to be forked waits for threads that Python did not start."""

from __future__ import annotations

import _thread
import hashlib

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
