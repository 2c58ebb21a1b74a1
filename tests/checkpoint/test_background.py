"""Saves that go on while their caller does: what stands at the end, and what a fault at any point costs."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import CountingFiles, Ranks, assert_whole, failing, newest, state_of, vanish
from tests.checkpoint.test_faults import in_child

from windlass.checkpoint.background import BackgroundSaver, Counters, Outcome
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError


def nothing() -> None: ...


def content(step: int) -> Content:
    state = state_of(step)
    return Content(
        {"optimizer": state},
        {"rng": state},
        weights={"model.safetensors": {"layer.weight": torch.full((3, 2), float(step))}},
    )


def begin(saver: BackgroundSaver, step: int, arrived: Callable[[], None] = nothing) -> bool:
    return saver.begin(step, content(step), arrived, meta={"best_metric": float(step)}, protected=[])


def saver_of(root: Path, files: Files | None = None) -> BackgroundSaver:
    return BackgroundSaver(CheckpointManager(Store(root, files=files), Retention(1)))


def until_it_ends(saver: BackgroundSaver) -> Outcome:
    """As a training loop of one process: what is sent with one group is known with the next."""
    while True:
        outcome = saver.agreed(saver.counters())
        if outcome is not None:
            return outcome
        time.sleep(0)  # an update would give the interpreter's lock to the thread that writes; so does this


def test_it_stands_when_it_is_said_to_and_not_before(tmp_path: Path) -> None:
    saver, release, copied = saver_of(tmp_path), threading.Event(), content(4)
    layer = copied.weights["model.safetensors"]["layer.weight"].zero_()

    def arrived() -> None:
        release.wait(60)
        layer.fill_(4)

    assert saver.begin(4, copied, arrived, meta={"best_metric": 4.0}, protected=[])
    for _ in range(3):
        assert saver.agreed(saver.counters()) is None
    assert saver.busy
    assert newest(tmp_path) is None
    release.set()
    assert until_it_ends(saver) == Outcome(4, tmp_path / "checkpoint-4")
    assert not saver.busy
    assert assert_whole(tmp_path / "checkpoint-4") == 4
    assert saver.agreed(saver.counters()) is None, "it is reported once"


def test_it_can_be_waited_for_in_either_half(tmp_path: Path) -> None:
    saver, release = saver_of(tmp_path), threading.Event()
    assert saver.finish() is None
    begin(saver, 1, arrived=lambda: bool(release.wait(60)))
    threading.Timer(0.01, release.set).start()
    assert saver.finish() == Outcome(1, tmp_path / "checkpoint-1")
    begin(saver, 2)
    while saver.agreed(saver.counters()) is None and not saver._pending.agreed:  # type: ignore[union-attr]
        time.sleep(0)
    if saver.busy:
        assert saver.finish() == Outcome(2, tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"], "retention has acted"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_costs_that_checkpoint_only(number: int, fast_disk: Path) -> None:
    at, reached = 1, True
    while reached:
        root = fast_disk / f"{number}-{at}"
        begin(first := saver_of(root), 1)
        first.finish()
        files = CountingFiles(at, failing(number))
        saver = saver_of(root, files)
        outcome = until_it_ends(saver) if begin(saver, 2) else Outcome(2, None)
        reached = files.count >= at
        # Where only the very last operations failed, what was dropped is complete nevertheless.
        assert newest(root) in ((1, 2) if outcome.folder is None else (2,))
        files.at = 0
        assert begin(saver, 3), "the next save is not hindered"
        assert until_it_ends(saver).folder == root / "checkpoint-3"
        assert not [path for path in root.iterdir() if path.name.startswith("tmp-")]
        at += 1
    assert at > 15


class Panic(BaseException):
    """As compiled code raises it."""


class Panicking(Files):
    """In a thread, where it comes to this operation."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def before(self, operation: str, path: Path) -> None:
        if operation == self.operation and threading.current_thread() is not threading.main_thread():
            raise Panic("in Rust")


def test_no_end_of_the_thread_passes_for_a_success(tmp_path: Path) -> None:
    for operation in ("write", "rename"):
        root = tmp_path / operation
        begin(first := saver_of(root), 1)
        first.finish()
        begin(saver := saver_of(root, Panicking(operation)), 2)
        with pytest.raises(CheckpointError, match="checkpoint 2 could not be written: Panic: in Rust"):
            saver.finish()
        assert newest(root) == 1


def test_a_disk_that_does_not_even_list_its_folders_costs_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(saver := saver_of(tmp_path), 1)
    saver.finish()
    with monkeypatch.context() as broken:
        broken.setattr(Store, "folders", lambda store: failing(errno.EIO)())
        assert not begin(saver, 2)
    assert begin(saver, 3)
    assert saver.finish() == Outcome(3, tmp_path / "checkpoint-3")


def test_the_end_of_the_process_at_any_operation_leaves_a_whole_checkpoint(fast_disk: Path) -> None:
    at, code = 1, 77
    while code == 77:
        root = fast_disk / str(at)
        begin(first := saver_of(root), 1)
        first.finish()

        def save_second(root: Path = root, at: int = at) -> None:
            saver = saver_of(root, CountingFiles(at, vanish))
            begin(saver, 2)
            until_it_ends(saver)

        code = in_child(save_second)
        assert newest(root) in (1, 2)
        at += 1
    assert code == 0
    assert at > 15


def test_a_mistake_in_the_program_ends_it(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    broken = Content(shared={"a/b": {}})
    saver.begin(1, broken, nothing, meta={}, protected=[])
    with pytest.raises(CheckpointError, match="cannot name a part"):
        saver.finish()
    assert not saver.busy
    assert list(tmp_path.iterdir()) == []


# --- several ranks


class Packets:
    """Sums of what all ranks tell, each known with the next exchange: `late` exchanges later, as from a feed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told: list[Counters] = [Counters(0, 0, 0)] * ranks.world

    def exchange(self, rank: int, counters: Counters) -> Counters:
        self._told[rank] = counters
        self._ranks.barrier.wait()
        sums = Counters(*map(sum, zip(*self._told, strict=True)))
        self._ranks.barrier.wait()
        return sums


def run_of_ranks(
    root: Path, steps: list[int], files_of: Callable[[int], Files], finish: bool = False
) -> list[Any]:
    """Every rank's outcomes, with the update at which it learned of each."""
    ranks = Ranks(3)
    packets = Packets(ranks)

    def body(rank: int) -> list[tuple[int, Outcome | None]]:
        saver = BackgroundSaver(CheckpointManager(ranks.store(rank, root, files_of(rank)), Retention(2)))
        told, known = saver.counters(), []
        due = list(steps)
        for update in itertools.count():
            ahead = packets.exchange(rank, saver.counters())
            outcome = saver.agreed(told)
            told = ahead  # one update late, as a feed that fetches ahead delivers them
            if outcome is not None:
                known.append((update, outcome))
            if due and not saver.busy:
                step = due.pop(0)
                if not begin(saver, step):
                    known.append((update, Outcome(step, None)))
            if finish and saver.busy and update % 3 == 0:
                known.append((update, saver.finish()))
            if not due and not saver.busy:
                break
        return known

    return ranks.run(body)


@pytest.mark.parametrize("finish", [False, True])
def test_ranks_learn_of_each_save_at_the_same_update(finish: bool, tmp_path: Path) -> None:
    first, *others = run_of_ranks(tmp_path, [1, 2, 3], lambda rank: Files(), finish)
    assert [outcome for _, outcome in first] == [Outcome(n, tmp_path / f"checkpoint-{n}") for n in (1, 2, 3)]
    assert others == [first, first]
    checkpoint = CheckpointManager(Store(tmp_path)).load(tmp_path / "checkpoint-3")
    assert [checkpoint.per_rank("rng", rank)["step"] for rank in range(3)] == [3, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fails_on_one_rank_costs_all_of_them_that_checkpoint(
    victim: int, fast_disk: Path
) -> None:
    for at in range(1, 11):
        root = fast_disk / f"{victim}-{at}"
        faulty: list[CountingFiles] = []

        def files_of(rank: int, at: int = at, faulty: list[CountingFiles] = faulty) -> Files:
            files = CountingFiles(at, failing(errno.EIO)) if rank == victim else CountingFiles()
            faulty.append(files)
            return files

        first, *others = run_of_ranks(root, [1, 2], files_of)
        assert others == [first, first], f"at operation {at}"
        steps = [outcome.step for _, outcome in first]
        assert steps == [1, 2]
        assert newest(root) == 2
        failed_at = [files.at for files in faulty if files.at]
        assert failed_at == [at]


@pytest.mark.parametrize("victim", [None, 1])
def test_ranks_that_all_leave_with_an_error_leave_a_checkpoint_behind(
    victim: int | None, fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask each other nothing: the writer rank sees by their lists of files that all have written."""
    monkeypatch.setattr("windlass.checkpoint.background._PATIENCE", 0.2 if victim else 60)
    ranks = Ranks(3)

    def body(rank: int) -> None:
        files = CountingFiles(3, failing(errno.EIO)) if rank == victim else Files()
        saver = BackgroundSaver(CheckpointManager(ranks.store(rank, fast_disk, files), Retention(2)))
        assert begin(saver, 1)
        saver.leave()

    ranks.run(body)
    assert newest(fast_disk) == (1 if victim is None else None)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_writer_rank_waits_for_the_files_of_others(leaves: bool, tmp_path: Path) -> None:
    ranks, release = Ranks(2), threading.Event()

    def body(rank: int) -> Outcome | None:
        saver = BackgroundSaver(CheckpointManager(ranks.store(rank, tmp_path)))
        begin(saver, 1, arrived=lambda: bool(release.wait(60)) if rank else None)
        if not leaves:
            saver.commit_when_seen()
        if rank == 0:
            saver.wait()
            threading.Timer(0.15, release.set).start()
        return saver.leave() if leaves else saver.finish()

    assert ranks.run(body) == [None if leaves else Outcome(1, tmp_path / "checkpoint-1")] * 2
    assert newest(tmp_path) == 1


def test_the_keeper_commits_when_it_sees_that_all_have_written(tmp_path: Path) -> None:
    saver, release = saver_of(tmp_path), threading.Event()
    saver.commit_when_seen()  # nothing is under way
    begin(saver, 1, arrived=lambda: bool(release.wait(60)))
    saver.commit_when_seen()
    assert newest(tmp_path) is None
    release.set()
    end = time.monotonic() + 60
    while newest(tmp_path) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert saver.busy, "the ranks have not met"
    assert saver.finish() == Outcome(1, tmp_path / "checkpoint-1")
    begin(saver, 2)
    saver.commit_when_seen()
    saver.leave()
    assert assert_whole(tmp_path / "checkpoint-2") == 2, "a commit by another process is waited for too"


def test_a_process_that_is_forked_meanwhile_leaves_the_save_alone(tmp_path: Path) -> None:
    """Also at its end, where it calls what its parent has registered: it has no thread for which it could wait."""
    saver, release = saver_of(tmp_path), threading.Event()
    begin(saver, 1, arrived=lambda: bool(release.wait(60)))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which else would be pytest's limit
        signal.alarm(30)
        saver.leave()
        saver.wait()
        os._exit(0 if saver.finish() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    release.set()
    assert saver.finish() == Outcome(1, tmp_path / "checkpoint-1")


def test_what_failed_is_not_committed_by_sight(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)

    def fail() -> None:
        raise OSError(5, "the disk is gone")

    begin(saver, 1, arrived=fail)
    saver.commit_when_seen()
    assert saver.finish() == Outcome(1, None)
    assert newest(tmp_path) is None
