from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.data.cases import end_in_a_minute
from tests.interrupts import InterruptAt
from tests.text.tokenizers import CHATML, byte_tokenizer
from tests.trainer.resume_cases import in_a_child

from windlass.core.errors import DataError
from windlass.text import worker_pool
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions

ROWS = [
    {"messages": [{"role": "user", "content": "x" * (n % 7)}, {"role": "assistant", "content": str(n)}]}
    for n in range(1100)
]
ALONE, TWO = TextOptions(num_proc=1, max_length=60), TextOptions(num_proc=2, max_length=60)


@pytest.fixture
def children() -> Iterator[set[Any]]:
    """The processes that this one has; the test leaves no other."""
    process = pytest.importorskip("psutil").Process()
    earlier = set(process.children())
    yield earlier
    assert set(process.children()) <= earlier


@pytest.mark.usefixtures("children")
def test_workers_return_the_rows_of_one_process() -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer(CHATML)
    expected = prepare_text(ROWS, tokenizer, ALONE)
    seen: list[tuple[int, int]] = []
    found = prepare_text(
        datasets.Dataset.from_list(ROWS), tokenizer, TWO, progress=lambda *done: seen.append(done)
    )
    assert list(found.dataset) == list(expected.dataset)
    assert found.summary == expected.summary
    assert seen[-1] == (1100, 1100)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) == 5


@pytest.mark.usefixtures("children")
def test_workers_import_nothing_from_the_current_folder_on_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("contextlib", "queue", "signal", "traceback"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert len(prepare_text(ROWS, byte_tokenizer(CHATML), TWO).dataset) == 1100


def wait_for_the_worker(earlier: set[Any]) -> None:
    """Wait until the one new child of this process has ended; its exit code is left to who started it."""
    (process,) = set(pytest.importorskip("psutil").Process().children()) - earlier
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a program choose the size of a pipe")
def test_this_process_makes_the_last_batches_and_workers_the_first(
    monkeypatch: pytest.MonkeyPatch, children: set[Any]
) -> None:
    expected = prepare_text(ROWS, byte_tokenizer(CHATML), ALONE)
    own, made = worker_pool.DatasetPart.batch, []

    def batch(part: worker_pool.DatasetPart, number: int, encoder: Any) -> Any:
        if not made:
            wait_for_the_worker(children)  # a pipe holds all that it sends
        made.append(number)
        return own(part, number, encoder)

    monkeypatch.setattr(worker_pool.DatasetPart, "batch", batch)
    assert list(prepare_text(ROWS, byte_tokenizer(CHATML), TWO).dataset) == list(expected.dataset)
    assert made == [4]


@pytest.mark.usefixtures("children")
def test_the_first_bad_row_is_reported() -> None:
    rows = list(ROWS)
    for bad in (1090, 400, 700):
        rows[bad] = {"messages": []}
    for options in (ALONE, TWO):
        with pytest.raises(DataError, match="row 400: messages is an empty conversation"):
            prepare_text(rows, byte_tokenizer(CHATML), options)


def test_rows_that_cannot_be_sent_are_prepared_here(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "more": lambda: None} for row in ROWS]
    found = prepare_text(rows, byte_tokenizer(CHATML), TWO)
    assert len(found.dataset) == 1100
    assert "the dataset is prepared in this process" in caplog.text


class ScriptRow(dict[str, Any]):
    """A row of a class that the script defines."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a program choose the size of a pipe")
def test_rows_that_a_worker_cannot_read_are_prepared_here(
    monkeypatch: pytest.MonkeyPatch, children: set[Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = prepare_text(ROWS, byte_tokenizer(CHATML), ALONE)
    monkeypatch.setattr(ScriptRow, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "ScriptRow", ScriptRow, raising=False)
    own, made = worker_pool.DatasetPart.batch, []

    def batch(part: worker_pool.DatasetPart, number: int, encoder: Any) -> Any:
        if not made:
            wait_for_the_worker(children)
        made.append(number)
        return own(part, number, encoder)

    monkeypatch.setattr(worker_pool.DatasetPart, "batch", batch)
    found = prepare_text([ScriptRow(row) for row in ROWS], byte_tokenizer(CHATML), TWO)
    assert list(found.dataset) == list(expected.dataset)
    assert "'ScriptRow'" in caplog.text


class Lost:
    """Takes the place of the class of its name, which then cannot be found by it."""


def test_rows_of_a_class_that_is_not_found_by_its_name_are_prepared_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = type("Lost", (dict,), {"__module__": __name__})
    found = prepare_text([made(row) for row in ROWS], byte_tokenizer(CHATML), TWO)
    assert len(found.dataset) == 1100
    assert "the dataset is prepared in this process" in caplog.text


SCRIPT = """
from tests.text.test_worker_pool import ROWS, TWO
from tests.text.tokenizers import CHATML, byte_tokenizer
from dataclasses import replace
from windlass import prepare_text
options = replace(TWO, formatting_func=lambda row: row["messages"][1]["content"])
print(len(prepare_text(ROWS, byte_tokenizer(CHATML), options).dataset))
"""


def test_a_script_without_a_main_guard_may_use_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1100\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a program choose the size of a pipe")
def test_a_user_whose_pipes_may_not_grow_prepares_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")  # beyond /proc/sys/fs/pipe-user-pages-soft

    expected = list(prepare_text(ROWS, byte_tokenizer(CHATML), ALONE).dataset)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert list(prepare_text(ROWS, byte_tokenizer(CHATML), TWO).dataset) == expected


def break_off() -> None:
    """As the system does if memory runs out: in the middle of a message."""
    frame = sys._getframe()
    while "outgoing" not in frame.f_locals:
        frame = frame.f_back or pytest.fail("the worker has no connection of that name")
    os.write(frame.f_locals["outgoing"].fileno(), struct.pack("!i", 1 << 20) + b"the begin of it")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("end", "code"), [((os._exit, (7,)), 7), ((break_off, ()), -9)])
def test_a_worker_that_dies_ends_the_preparation(
    monkeypatch: pytest.MonkeyPatch, children: set[Any], end: tuple[object, ...], code: int
) -> None:
    class Fatal(worker_pool.DatasetPart):
        def __reduce__(self) -> tuple[object, ...]:
            return end

        def batch(self, *args: Any) -> Any:
            wait_for_the_worker(children)  # else all may be done here before
            return super().batch(*args)

    monkeypatch.setattr(worker_pool, "DatasetPart", Fatal)
    with pytest.raises(RuntimeError, match=f"ended with exit code {code}"):
        prepare_text(ROWS, byte_tokenizer(CHATML), TWO)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of this process as Linux lists them")
@pytest.mark.usefixtures("children")
def test_without_files_for_more_workers_this_process_prepares(caplog: pytest.LogCaptureFixture) -> None:
    resource, tokenizer = pytest.importorskip("resource"), byte_tokenizer(CHATML)
    expected = prepare_text(ROWS, tokenizer, ALONE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Enough for the first worker, and not for four.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
    try:
        found = prepare_text(ROWS, tokenizer, TextOptions(num_proc=5, max_length=60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert list(found.dataset) == list(expected.dataset)
    assert "Too many open files" in caplog.text


def test_a_worker_that_ignores_sigterm_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `trap '' TERM` in the script of a job."""

    class Lasting(worker_pool.DatasetPart):
        def __reduce__(self) -> tuple[object, ...]:
            return signal.pause, ()

    monkeypatch.setattr(worker_pool, "DatasetPart", Lasting)

    def work() -> None:
        end_in_a_minute()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert len(prepare_text(ROWS, byte_tokenizer(CHATML), TWO).dataset) == 1100

    assert in_a_child(work) == 0


@pytest.mark.usefixtures("children")
def test_ctrl_c_while_workers_are_sent_their_parts_ends_them() -> None:
    for line in itertools.count():
        pool = worker_pool._Pool()
        pool.start(1)
        with InterruptAt(worker_pool, line) as interrupt:
            pool.send([("encoder", "part")])  # type: ignore[list-item]
        pool.close()
        if not interrupt.came:
            break
    assert line > 3
