"""One run at a time writes to an output folder: a live run keeps others out, a dead one never does."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.faults import failing

from windlass.checkpoint import run_lock
from windlass.checkpoint.run_lock import LOCK_NAME, FolderInUse, RunLock
from windlass.core.locations import unwritable
from windlass.core.process_identity import ProcessIdentity

HOLDER = Path(__file__).parent / "lock_holder.py"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "GRACE", 0.3)
    monkeypatch.setattr(run_lock, "PATIENCE", 0.6)
    monkeypatch.setattr(run_lock, "_POLL", 0.01)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that holds the lock of the folder, in a process group of its own."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(HOLDER), str(tmp_path), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def refused(folder: Path) -> str:
    with pytest.raises(FolderInUse) as caught:
        RunLock(folder).acquire()
    return caught.value.holder


def test_a_live_run_blocks_and_a_killed_one_does_not(tmp_path: Path, holder: Any) -> None:
    process = holder("--hub_token", "hf_123", "--name=x")
    said = refused(tmp_path)
    assert re.search(
        rf"host {os.uname().nodename}, pid {process.pid}, user \S+, started 20\S+ \S+ \S+, command ", said
    )
    assert said.endswith("--hub_token '***' --name=x")
    assert "hf_123" not in said
    os.kill(process.pid, signal.SIGSTOP)
    refused(tmp_path)
    os.kill(process.pid, signal.SIGKILL)  # its parent does not wait for it: it stays a zombie
    with RunLock(tmp_path):
        refused(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_forked_does_not_block(tmp_path: Path, holder: Any) -> None:
    process = holder("fork")
    os.kill(process.pid, signal.SIGKILL)
    RunLock(tmp_path).acquire()


def test_without_a_lock_of_the_system_the_process_is_looked_up(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_is_locked", lambda descriptor: False)
    process = holder()
    refused(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    refused(tmp_path)
    record = json.loads((tmp_path / LOCK_NAME).read_text())
    write_record(tmp_path, {**record, "started": record["started"] - 1})  # an earlier process of the same pid
    RunLock(tmp_path).acquire()


def write_record(folder: Path, record: dict[str, Any], beat: int = 0) -> None:
    path = folder / LOCK_NAME
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"beat": beat, **record}))


ELSEWHERE = {
    "host": "far", "boot": "another", "namespace": "pid:[1]", "pid": 1, "started": 5, "token": "abc",
}  # fmt: skip


def test_a_run_of_another_machine_is_judged_by_its_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 30.0)
    write_record(tmp_path, ELSEWHERE)
    with (tmp_path / LOCK_NAME).open() as held:
        assert run_lock.is_held(tmp_path) is None
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run_lock.is_held(tmp_path)  # the file system tells
    beats, stop = iter(range(1, 10**9)), threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            (tmp_path / "new").write_text(json.dumps({"beat": next(beats), **ELSEWHERE}))
            os.replace(tmp_path / "new", tmp_path / LOCK_NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert "host far" in refused(tmp_path)
    finally:
        stop.set()
        thread.join()
    monkeypatch.setattr(run_lock, "PATIENCE", 0.2)
    RunLock(tmp_path).acquire()


def test_the_counter_of_a_holder_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT", 0.01)
    lock = RunLock(tmp_path)
    lock.acquire()
    before = json.loads((tmp_path / LOCK_NAME).read_text())
    while (now := json.loads((tmp_path / LOCK_NAME).read_text()))["beat"] < before["beat"] + 3:
        pass
    assert {**now, "beat": 0} == {**before, "beat": 0}
    lock.release()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"beat":', b"[]", b'{"token": "../x", "pid": 1}', b"\xff" * 100]
)
def test_a_lock_file_that_says_nothing_is_watched(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    RunLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("system_locks", [True, False])
def test_one_of_many_that_start_at_once_gets_it(
    system_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over nothing, a dead run, and a dead run with a dead successor that had not moved up yet."""
    if not system_locks:
        monkeypatch.setattr(run_lock, "_is_locked", lambda descriptor: False)
        monkeypatch.setattr(run_lock, "_lock", lambda descriptor: None)
    monkeypatch.setattr(run_lock, "GRACE", 0.0)
    monkeypatch.setattr(run_lock, "PATIENCE", 60.0)  # a record that is being written is not a dead run's
    dead = {**asdict(ProcessIdentity.current()), "started": 1}
    for number in range(30):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        if number % 3 > 0:
            write_record(folder, {**dead, "token": "abc"})
        if number % 3 > 1:
            (folder / f"{LOCK_NAME}.abc").write_text(json.dumps({**dead, "token": "def"}))
        locks, begin, got = [RunLock(folder) for _ in range(6)], threading.Barrier(6), []

        def claim(lock: RunLock, begin: threading.Barrier = begin, got: list[RunLock] = got) -> None:
            begin.wait()
            try:
                lock.acquire()
                got.append(lock)
            except FolderInUse:
                pass

        threads = [threading.Thread(target=claim, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert os.listdir(folder) == [LOCK_NAME]
        got[0].release()
        assert os.listdir(folder) == []


def test_a_run_that_lost_its_lock_finds_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    lock.acquire()
    (folder / LOCK_NAME).unlink()
    lock.acquire()  # no other run took it: it is taken again
    (folder / LOCK_NAME).unlink()
    other = RunLock(folder)
    other.acquire()
    with pytest.raises(FolderInUse):
        lock.acquire()
    lock.release()
    assert (folder / LOCK_NAME).exists()  # the other's
    other.release()
    lock.acquire()
    (folder / LOCK_NAME).unlink()
    other.acquire()
    record = (folder / LOCK_NAME).read_bytes()
    lock.beat()
    lock.release()
    assert (folder / LOCK_NAME).read_bytes() == record
    other.release()


def test_a_lock_that_cannot_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(run_lock, "_record", lambda token: failing()())
        with pytest.raises(OSError, match="No space"):
            RunLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == []


def test_what_an_interrupt_left_of_this_process_does_not_block_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.forget()  # as an interrupt does that comes before the file is removed
    assert os.listdir(tmp_path) == [LOCK_NAME]
    with RunLock(tmp_path):
        refused(tmp_path)
    lock.acquire()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_whose_object_is_gone_is_free(tmp_path: Path) -> None:
    """An interrupt may come before the first instruction of a release."""
    lock = RunLock(tmp_path)
    lock.acquire()
    refused(tmp_path)
    del lock
    with RunLock(tmp_path):
        refused(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_thread_that_counts_keeps_no_lock_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two beats it would hold the last one that it counted, for seconds after its object is gone."""
    locks, main, sleep = [RunLock(tmp_path)], threading.current_thread(), time.sleep
    locks[0].acquire()
    kept = weakref.ref(locks[0])

    def rest(seconds: float) -> None:
        if threading.current_thread() is not main:
            sleep(seconds)
        elif json.loads((tmp_path / LOCK_NAME).read_text())["beat"]:
            locks.clear()
            raise InterruptedError(str(kept()))

    monkeypatch.setattr(time, "sleep", rest)
    with pytest.raises(InterruptedError, match=r"^None$"):
        run_lock._beat_for_ever()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_the_counter_moves_on_while_another_thread_acquires_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be in the middle of a look at those that are held."""
    first, second = (RunLock(folder) for folder in (tmp_path / "first", tmp_path / "second"))
    for lock in (first, second):
        lock.path.parent.mkdir()
    left = [second]

    def acquire(frame: Any, event: str, _: Any) -> Any:
        if not left or frame.f_code.co_filename != weakref.__file__:
            return None
        if event == "return":
            left.pop().acquire()
        return acquire

    monkeypatch.setattr(run_lock, "_beater", threading.Thread())
    monkeypatch.setattr(run_lock, "BEAT", 0.01)
    threading.settrace(acquire)
    try:
        first.acquire()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    while left or not second.held:
        time.sleep(0.01)
    before, until = first.path.read_bytes(), time.monotonic() + 20.0
    while first.path.read_bytes() == before and time.monotonic() < until:
        time.sleep(0.01)
    assert first.path.read_bytes() != before
    first.release()
    second.release()


def test_a_lock_that_is_about_to_be_given_up_is_waited_for(tmp_path: Path) -> None:
    lock, written = RunLock(tmp_path), threading.Event()
    lock.acquire()
    lock.release_after(lambda: assert_set(written))
    threading.Timer(
        run_lock.GRACE + 0.3, written.set
    ).start()  # longer than a run that does not end is waited for
    with RunLock(tmp_path):
        assert written.is_set()


@pytest.mark.skipif(os.name != "posix", reason="permissions of a POSIX system")
def test_a_lock_that_may_not_be_read_is_named_with_its_owner() -> None:
    with tempfile.TemporaryDirectory() as name:  # one that another user can enter
        folder = Path(name)
        folder.chmod(0o777)
        (folder / LOCK_NAME).touch(mode=0o000)
        owner, user = (folder / LOCK_NAME).owner(), os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError) as caught:
                RunLock(folder).acquire()
        finally:
            os.seteuid(user)
    expected = f"may not read the lock {LOCK_NAME} in it, which belongs to user {owner}"
    assert expected in str(unwritable("runs/x", caught.value))
