"""An exception of a signal handler at any instant of a save: what lies there is a whole checkpoint, or none."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import newest, save
from tests.checkpoint.test_background import begin, nothing, saver_of

from windlass import Accelerator
from windlass.checkpoint.background import BackgroundCall, BackgroundSaver, Outcome
from windlass.checkpoint.store import Store

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
# By default a part of them; all lines and a thousand instants: WINDLASS_INTERRUPTS=1000.
ROUNDS = int(os.environ.get("WINDLASS_INTERRUPTS", "60"))
STRIDE = 1 if ROUNDS >= 1000 else 7


class Interrupted(Exception):  # noqa: N818 (nothing is wrong)
    """As torch's handler of SIGCHLD raises RuntimeError when a worker dies."""


def interrupt(*_: Any) -> None:
    raise Interrupted


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Within the body the function that it gives lets `Interrupted` be raised after so many seconds."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # it may have gone off on the way here; there is no second one
            signal.signal(signal.SIGALRM, before)


def assert_all_whole(root: Path) -> None:
    """Whatever is a checkpoint by its name verifies."""
    for path in root.iterdir() if root.exists() else ():
        if not path.name.startswith(("tmp-", ".windlass-")):
            Store(root, name="state" if "state" in path.name else "checkpoint-{step}").verify(path)


def test_a_wait_that_is_broken_off_can_be_taken_up_again() -> None:
    release, done = threading.Event(), []
    call = BackgroundCall("writes", lambda: done.append(release.wait(60)))
    with interrupts() as after:
        for _ in range(5):
            after(0.01)
            with pytest.raises(Interrupted):
                call.wait()
            assert not call.ended
    threading.Timer(0.01, release.set).start()
    call.wait()
    assert done == [True]
    assert (call.ended, call.error) == (True, None)


def test_what_is_still_being_written_is_not_committed(tmp_path: Path) -> None:
    """The first wait ends with an exception, and what the run does about it must wait for the files too."""
    begin(first := saver_of(tmp_path), 1)
    first.finish()
    release = threading.Event()
    begin(saver := saver_of(tmp_path), 2, arrived=lambda: bool(release.wait(60)))
    with interrupts() as after:
        after(0.01)
        with pytest.raises(Interrupted):
            saver.finish()
    opened = threading.Timer(0.05, release.set)
    opened.start()
    saver.leave()
    assert release.is_set()
    assert newest(tmp_path) == 2
    assert saver.finish() == Outcome(2, tmp_path / "checkpoint-2")


class AtLine:
    """Raises at the n-th line that this thread runs in the modules that save; counts them."""

    MODULES = ("background.py", "store.py", "staged.py", "manager.py")

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> AtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        path = Path(frame.f_code.co_filename)
        return self._line if path.parent.name == "checkpoint" and path.name in self.MODULES else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event in ("line", "return"):
            self.count += 1
            if self.count == self.at:
                raise Interrupted
        return self._line


def in_background(root: Path) -> BackgroundSaver:
    saver = saver_of(root)
    begin(saver, 2)
    saver.finish()
    return saver


def test_an_interrupt_at_any_line_of_a_save_in_the_background(fast_disk: Path) -> None:
    at, reached = -random.randrange(STRIDE), True
    while reached:
        at += STRIDE
        root = fast_disk / str(at)
        begin(first := saver_of(root), 1)
        first.finish()
        saver = saver_of(root)
        with AtLine(at) as lines, contextlib.suppress(Interrupted):
            begin(saver, 2)
            saver.finish()
        reached = lines.count >= at
        saver.leave()  # as the run does that ends with the exception
        assert_all_whole(root)
        assert newest(root) in (1, 2)
        begin(again := saver_of(root), 3)
        assert again.finish() == Outcome(3, root / "checkpoint-3")
        assert [path.name for path in root.iterdir()] == ["checkpoint-3"], f"line {at}"
        shutil.rmtree(root)
    assert at > 60


def test_an_interrupt_at_any_line_of_a_save_that_is_waited_for(fast_disk: Path) -> None:
    at, reached = -random.randrange(STRIDE), True
    while reached:
        at += STRIDE
        root = fast_disk / str(at)
        save(root, 1)
        with AtLine(at) as lines, contextlib.suppress(Interrupted):
            save(root, 2)
        reached = lines.count >= at
        assert_all_whole(root)
        assert newest(root) in (1, 2)
        assert save(root, 3) is not None
        assert [path.name for path in root.iterdir()] == ["checkpoint-3"], f"line {at}"
        shutil.rmtree(root)
    assert at > 100


@pytest.mark.parametrize("how", ["background", "waiting", "save_state"])
def test_interrupts_at_random_instants(how: str, fast_disk: Path) -> None:
    """Again and again in one folder, the wait for the end included."""
    draws, root = random.Random(3), fast_disk / "run"
    loop = a_loop() if how == "save_state" else None
    for step in range(2, 2 + ROUNDS):
        saver = saver_of(root)
        with contextlib.suppress(Interrupted), interrupts() as after:
            after(instant(draws))
            if how == "background":
                begin(saver, step)
                after(instant(draws))
                saver.finish()
            elif loop is None:
                save(root, step)
            else:
                loop.save_state(str(root / "state"))
        saver.leave()
        assert_all_whole(root)
    loop.save_state(str(root / "state")) if loop else save(root, 1)
    assert not [path for path in root.iterdir() if path.name.startswith("tmp-")]


def instant(draws: random.Random) -> float:
    """Most of them in the course of a save, on a machine that is idle or busy (seconds)."""
    return float(10 ** draws.uniform(-5, -0.7))


def a_loop() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def test_nothing_is_committed_before_it_is_sealed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    staged = store.begin(1, {}, names=["rank-00000.json", "weights.bin"])
    staged.write_rank_state({})
    with pytest.raises(Exception, match="not everything was written"):
        store.commit(staged)
    with pytest.raises(Exception, match=r"lacks files that were to be written: weights\.bin"):
        staged.seal()
    staged.write_file("weights.bin", b"12")
    staged.seal()
    os.truncate(staged.folder / "weights.bin", 1)
    with pytest.raises(OSError, match="2 bytes were written and 1 are there"):
        store.commit(staged)
    assert store.list() == []
    nothing()
