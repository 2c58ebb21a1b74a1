"""Data workers that do not start, that die, and that get the signals of their job while they start."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.cases import Augmented, Stream, end_in_a_minute, of_worker, train_loader
from tests.dist.garbage import collect_among_threads, leave_a_store_behind
from tests.interrupts import InterruptAt
from tests.trainer.preemption_cases import At
from tests.trainer.resume_cases import Case, Samples, build, in_a_child, run, same_run
from torch.utils.data import DataLoader, Dataset

from windlass import Accelerator, Trainer
from windlass.config.loop_options import DataLoaderConfiguration
from windlass.config.plan import BatchPlan
from windlass.core.errors import EXIT_PREEMPTED, ConfigError, WorkerError
from windlass.core.job_signals import handling
from windlass.data import workers
from windlass.data.foreign_loader import ForeignLoader
from windlass.data.worker_queue import WorkerEvent
from windlass.data.workers import START_TIMEOUT_VARIABLE, Reader, read_batches, start_timeout

PATIENCE = 1.0


class Replacements(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and "replaced" in record.getMessage():
            self.messages.append(record.getMessage())


class HeldLock:
    """A lock that a thread of this process holds, and that the next process to be forked needs."""

    def __init__(self, always: bool = False) -> None:
        self._lock, self.wanted, self._always = threading.Lock(), False, always
        holder = threading.Thread(target=self._lock.acquire)
        holder.start()
        holder.join()
        os.register_at_fork(after_in_child=self._need, after_in_parent=self._forked)

    def _need(self) -> None:
        if self.wanted:
            self._lock.acquire()

    def _forked(self) -> None:
        self.wanted &= self._always


def _collated(samples: list[Any]) -> Any:
    return torch.stack([sample["x"] for sample in samples])


def _own_loader(count: int = 6, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(count), batch_size=2, num_workers=2, collate_fn=_collated, **options)


def _prepared() -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = DataLoaderConfiguration(data_seed=3)
    return list(Accelerator(cpu=True, dataloader_config=config).prepare(_own_loader(shuffle=True)))


def _foreign() -> list[torch.Tensor]:
    loader = ForeignLoader(_own_loader(shuffle=True), BatchPlan(2, 1, 1, 0, eval=2), start_timeout=PATIENCE)
    return [group.batches[0] for group in loader.groups()]


def _stream() -> list[torch.Tensor]:
    loader = train_loader(
        Stream(Augmented(8)), 2, workers=2, collate=_collated, start_timeout=PATIENCE, drop_last=True
    )
    return [group.batches[0] for group in loader.groups()]


ARGUMENTS = {
    "dataloader_num_workers": 1,
    "dataloader_start_timeout": PATIENCE,
    "eval_strategy": "epoch",
    "num_train_epochs": 1,
    "log_level": "warning",
}


def test_workers_that_hang_in_their_fork_are_replaced(tmp_path: Path) -> None:
    """Each kind of loader once with a worker that needs a lock which another thread held at the fork."""

    def work() -> None:
        os.environ[START_TIMEOUT_VARIABLE] = str(PATIENCE)
        held, said = HeldLock(), Replacements()
        logging.getLogger("windlass").addHandler(said)

        def hanging(make: Callable[[], Any], times: int = 1) -> Any:
            before, held.wanted = len(said.messages), True
            made = make()
            assert len(said.messages) >= before + times, said.messages  # a slow machine may replace more
            return made

        for make in (_prepared, _foreign, _stream):
            whole, replaced = make(), hanging(make)
            assert len(whole) == len(replaced)
            assert all(torch.equal(one, other) for one, other in zip(whole, replaced, strict=True))

        def in_evaluation() -> None:
            held.wanted = True

        case = Case(ARGUMENTS)
        whole = run(tmp_path / "whole", case)
        told = At("on_epoch_end", 5, in_evaluation)
        replaced = hanging(lambda: run(tmp_path / "replaced", case, told), times=2)
        same_run(tmp_path / "replaced", replaced, tmp_path / "whole", whole)

    assert in_a_child(work) == 0


class Blocking(Dataset[int]):
    """Numbers, of which the second one never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            threading.Event().wait()
        return index


def test_a_loader_that_is_left_waits_little_for_a_busy_worker_and_ends_it_whatever_signal_it_ignores() -> (
    None
):
    """With the calls that torch makes then."""

    def work() -> None:
        before = set(multiprocessing.active_children())
        with handling(signal.SIGTERM, lambda number: None):
            batches = read_batches(DataLoader(Blocking(), batch_size=1, num_workers=1), Reader("training"))
            assert next(batches).tolist() == [0]
            (worker,) = set(multiprocessing.active_children()) - before
            worker.join(3600.0)
            assert worker.exitcode is None
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch no longer watches workers that it ends
            worker.terminate()
            multiprocessing.connection.wait([worker.sentinel], 20.0)
            worker.join(3600.0)  # what it held is closed a moment before it has ended
            assert worker.exitcode == -signal.SIGKILL

    assert in_a_child(work) == 0


class Lasting(Dataset[int]):
    """The process of a worker that has read it does not end."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        multiprocessing.util.Finalize(None, threading.Event().wait, exitpriority=1)
        return index


def test_a_worker_that_takes_long_to_end_after_the_last_batch_is_no_error() -> None:
    def work() -> None:
        end_in_a_minute()
        loader = DataLoader(Lasting(), batch_size=1, num_workers=2)
        assert [batch.item() for batch in read_batches(loader, Reader("training"))] == [0, 1]

    assert in_a_child(work) == 0


def test_a_worker_that_never_starts_is_an_error() -> None:
    def work() -> None:
        held, before = HeldLock(always=True), set(multiprocessing.active_children())
        held.wanted = True
        with pytest.raises(WorkerError, match=r"worker 0 did not start within 0.05 s in \d attempts"):
            next(train_loader(Augmented(4), 2, workers=1, start_timeout=0.05).groups())
        assert set(multiprocessing.active_children()) == before

    assert in_a_child(work) == 0


@pytest.mark.parametrize("text", ["0", "inf", "soon"])
def test_a_time_of_the_environment_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{START_TIMEOUT_VARIABLE}='{text}'"):
        start_timeout({START_TIMEOUT_VARIABLE: text})


def test_two_threads_may_start_workers_at_the_same_time() -> None:
    """One of them just when the other one forks."""

    def work() -> None:
        said, others = Replacements(), list[threading.Thread]()
        logging.getLogger("windlass").addHandler(said)

        def read() -> None:
            loader = DataLoader(list(range(4)), batch_size=2, num_workers=1)
            assert len(list(read_batches(loader, Reader("training", start_timeout=5 * PATIENCE)))) == 2

        def other_first() -> None:
            if not others:
                others.append(threading.Thread(target=read))
                others[0].start()
                others[0].join()

        os.register_at_fork(before=other_first)
        read()
        assert others
        assert not said.messages

    assert in_a_child(work) == 0


class Killed(Augmented):
    """In a worker, the sample `at` is the death of the process, as long as there is a file."""

    def __init__(self, count: int, at: int, file: Path) -> None:
        super().__init__(count)
        self._at, self._file = at, file

    def __getitem__(self, index: int) -> Any:
        if index == self._at and self._file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("at", [0, 9])
def test_a_killed_worker_is_named_and_the_loader_can_be_read_again(
    tmp_path: Path, at: int, persistent: bool
) -> None:
    file = tmp_path / "kill"
    file.touch()
    dataset = Killed(12, at, file)
    options = {"order": "sequential", "workers": 2, "persistent_workers": persistent, "collate": _collated}
    loader = train_loader(dataset, 2, **options)
    named = rf"worker {at // 2 % 2} \(pid \d+\) was killed by SIGKILL while it read samples \[{at - at % 2}, "
    seen: list[Any] = []
    with pytest.raises(WorkerError, match=named + r"\d+\] \(epoch 0\) for training"):
        seen.extend(group.batches[0] for group in loader.groups())
    file.unlink()
    seen += [group.batches[0] for group in loader.groups()]
    whole = [group.batches[0] for group in train_loader(dataset, 2, **options).groups()]
    assert all(torch.equal(one, other) for one, other in zip(seen, whole, strict=True))


class KilledAtItsEvent(Dataset[int]):
    """A worker is killed while it looks whether its loader has been left, which it does before each batch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            with getattr(of_worker("done_event"), "_cond", contextlib.nullcontext()):
                time.sleep(0.3)  # until its parent waits for this batch
                os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_worker_killed_while_it_looks_at_its_event_stops_no_other_process() -> None:
    """Where torch itself notices the death, as in a thread of the script's, and where the loader is left."""

    def work() -> None:
        end_in_a_minute()
        loader = DataLoader(KilledAtItsEvent(), batch_size=2, num_workers=1, collate_fn=list, timeout=1)
        batches = read_batches(loader, Reader("evaluation"))
        next(batches)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # nothing else notices it
        with pytest.raises(WorkerError, match="was killed by SIGKILL while it read data for evaluation"):
            list(batches)
        del batches
        gc.collect()

    assert in_a_child(work) == 0


def test_a_death_is_an_error_only_in_the_thread_that_reads() -> None:
    """And not in the main one, which has read a loader before and does something else now."""
    list(read_batches(DataLoader(list(range(4)), batch_size=2, num_workers=1), Reader("training")))
    before, begun, died = set(multiprocessing.active_children()), threading.Event(), list[WorkerError]()

    def read() -> None:
        batches = read_batches(
            DataLoader(Blocking(), batch_size=1, num_workers=1, timeout=1), Reader("evaluation")
        )
        next(batches)
        begun.set()
        with pytest.raises(WorkerError) as caught:
            next(batches)
        died.append(caught.value)

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid or 0, signal.SIGKILL)
    while thread.is_alive():
        sum(range(1000))  # handlers of signals run here
    assert "was killed by SIGKILL" in str(died[0])


def named_where_the_next_batch_is_asked_for(persistent: bool) -> None:
    groups = train_loader(Augmented(40), 2, workers=2, persistent_workers=persistent).groups()
    before = set(multiprocessing.active_children())
    next(groups)
    worker = (set(multiprocessing.active_children()) - before).pop()
    os.kill(worker.pid or 0, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)
    sum(range(1000))  # handlers of signals run here
    with pytest.raises(WorkerError, match=rf"\(pid {worker.pid}\) was killed by SIGKILL"):
        list(groups)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_death_is_an_error_only_where_batches_are_asked_for(persistent: bool) -> None:
    """And not in the middle of a save, say, or of a callback."""
    named_where_the_next_batch_is_asked_for(persistent)


def test_so_it_is_in_a_process_forked_from_one_that_has_read() -> None:
    list(read_batches(DataLoader(list(range(4)), batch_size=2, num_workers=1), Reader("training")))
    assert in_a_child(lambda: named_where_the_next_batch_is_asked_for(persistent=False)) == 0


def test_two_deaths_at_once_are_no_error_between_batches() -> None:
    """One of them after our look at the workers, and before torch's."""
    before = signal.getsignal(signal.SIGCHLD)
    dying: list[Any] = []

    def late(number: int, frame: Any) -> None:
        held = signal.pthread_sigmask(
            signal.SIG_BLOCK, [signal.SIGCHLD]
        )  # the second is not handled meanwhile
        try:
            while dying:
                pid = dying.pop().pid
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            torch._C._error_if_any_worker_fails()  # what torch's handler does
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    signal.signal(signal.SIGCHLD, late)
    try:
        groups = train_loader(Augmented(40), 2, workers=2).groups()
        others = set(multiprocessing.active_children())
        next(groups)
        first, second = set(multiprocessing.active_children()) - others
        dying.append(second)
        os.kill(first.pid or 0, signal.SIGKILL)
        first.join()
        sum(range(1000))  # handlers of signals run here
        assert not dying
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            list(groups)
    finally:
        signal.signal(signal.SIGCHLD, before)


class Interrupted(DataLoader[Any]):
    """Ctrl-C comes once its workers have started."""

    runs = False

    def __iter__(self) -> Any:
        batches, self.runs = super().__iter__(), True
        return batches

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.runs and name == "worker_init_fn":
            raise KeyboardInterrupt


def test_ctrl_c_right_after_the_first_start_is_no_error_of_a_worker() -> None:
    def work() -> None:
        end_in_a_minute()
        with pytest.raises(KeyboardInterrupt):
            read_batches(Interrupted([0], num_workers=4), Reader("training"))

    assert in_a_child(work) == 0


def test_ctrl_c_at_any_line_of_a_wait_for_a_batch_is_raised() -> None:
    def work() -> None:
        end_in_a_minute()
        for line in itertools.count():
            batches = read_batches(DataLoader([0, 1], num_workers=1), Reader("training"))
            next(batches)
            with InterruptAt(workers, line) as interrupt:
                next(batches)
            if not interrupt.came:
                break
        assert line > 5

    assert in_a_child(work) == 0


def test_ctrl_c_while_the_last_workers_end_is_no_error_of_theirs() -> None:
    """Torch kills them then."""
    whole = WorkerEvent.set

    def interrupted(event: WorkerEvent) -> None:
        WorkerEvent.set = whole  # type: ignore[method-assign]
        raise KeyboardInterrupt

    def work() -> None:
        end_in_a_minute()
        gc.disable()  # a loader of another test, whose event would be set
        WorkerEvent.set = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            list(read_batches(DataLoader([0], num_workers=2), Reader("training")))

    assert in_a_child(work) == 0


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=4, num_workers=2)


@pytest.mark.parametrize("kind", [Trainer, OwnLoader])
def test_a_signal_to_the_job_while_workers_start_ends_none_of_them(tmp_path: Path, kind: Any) -> None:
    """It is sent to the whole process group by each worker, right after it was forked."""
    folder, case = tmp_path / "told", Case({"dataloader_num_workers": 2}, trainer=kind)

    def work() -> None:
        os.setpgid(0, 0)
        begun: list[bool] = []
        os.register_at_fork(after_in_child=lambda: begun and os.killpg(0, signal.SIGTERM))
        build(folder, case, At("on_epoch_begin", 5, lambda: begun.append(True))).train()

    assert in_a_child(work) == EXIT_PREEMPTED
    whole = run(tmp_path / "whole", case)
    same_run(folder, run(folder, case, resume=True), tmp_path / "whole", whole)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_the_garbage_collector_finds_are_not_waited_for(persistent: bool) -> None:
    before = multiprocessing.active_children()
    loader = train_loader(Augmented(16), 2, workers=2, persistent_workers=persistent)
    groups = loader.groups()
    next(groups)
    workers = [child for child in multiprocessing.active_children() if child not in before]
    assert len(workers) == 2
    cycle: list[Any] = [loader, groups]
    cycle.append(cycle)
    del loader, groups, cycle
    gc.collect()
    codes = {worker.exitcode for worker in workers}
    assert codes == {-signal.SIGKILL}, "torch waits for them, five seconds for each"


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        collect_among_threads()
        return index


def test_a_worker_does_not_collect_what_was_garbage_before_it() -> None:
    def work() -> None:
        end_in_a_minute()
        leave_a_store_behind()
        assert len(list(read_batches(DataLoader(Collecting(), num_workers=1), Reader("training")))) == 4

    assert in_a_child(work) == 0
