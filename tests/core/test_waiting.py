from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.small import Net, rows

from windlass import Trainer, TrainingArguments
from windlass.core.waiting import ThreadWaiting, _libgomp, shorten_waits, thread_waiting


class Machine:
    """A clock, the seconds that the process has waited for a core, and whether its waits are short."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self.short = False

    def shorten(self) -> Callable[[], None]:
        self.short = True
        return self.lengthen

    def lengthen(self) -> None:
        self.short = False

    def passes(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.waited += seconds * share


def test_waits_are_short_while_other_programs_have_the_cores() -> None:
    machine = Machine()
    waiting = ThreadWaiting(lambda: machine.waited, lambda: machine.now, machine.shorten)
    seen = []
    for share in (0.0, 0.2, 0.4, 0.2, 0.4, 0.1, 0.2):  # between 0.15 and 0.25 what was chosen stays
        machine.passes(1.0, share)
        waiting.look()
        seen.append(machine.short)
    assert seen == [False, False, True, True, True, False, False]


def test_a_choice_takes_half_a_second_of_looking() -> None:
    machine = Machine()
    waiting = ThreadWaiting(lambda: machine.waited, lambda: machine.now, machine.shorten)
    machine.passes(0.3, 1.0)
    waiting.look()
    assert not machine.short
    machine.passes(0.3, 1.0)
    waiting.look()
    assert machine.short


def test_without_the_kernels_account_nothing_is_chosen() -> None:
    machine = Machine()
    waiting = ThreadWaiting(lambda: None, lambda: machine.now, machine.shorten)
    machine.passes(9.0, 1.0)
    waiting.look()
    assert waiting.due == math.inf


def test_with_another_thread_library_nothing_is_chosen() -> None:
    machine = Machine()
    waiting = ThreadWaiting(lambda: machine.waited, lambda: machine.now, lambda: None)
    for _ in range(2):
        machine.passes(1.0, 1.0)
        waiting.look()
    assert waiting.due == math.inf


_SPINS = """
import time, torch
from windlass.core.waiting import shorten_waits
torch.set_num_threads(2)
large = torch.ones(1 << 20)

def seconds():
    before = time.process_time()
    for _ in range(60):
        large.add_(1)
        time.sleep(0.004)  # a thread that waits for the next operation spins for most of it
    return time.process_time() - before

seconds()
for attempt in range(3):  # on a busy machine a thread may be held up, which is not spinning
    spinning = seconds()
    lengthen = shorten_waits()
    asleep = seconds()
    lengthen()
    again = seconds()
    if asleep < 0.6 * spinning and asleep < 0.6 * again:
        break
print(spinning, asleep, again)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or (os.cpu_count() or 1) < 2, reason="libgomp of Linux, two cores"
)
def test_short_waits_use_less_processor_time_and_can_be_ended() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "GOMP", "KMP"))}
    done = subprocess.run(
        [sys.executable, "-c", _SPINS], env=environ, capture_output=True, text=True, check=True
    )
    spinning, asleep, again = map(float, done.stdout.split())
    assert asleep < 0.6 * spinning, "processor seconds with short waits"
    assert asleep < 0.6 * again, "processor seconds afterwards"


_REPLACED = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1])
os.unlink(sys.argv[1])
from windlass.core.waiting import shorten_waits
assert "libgomp.so.1 (deleted)" in open("/proc/self/maps").read()
assert shorten_waits() is None
"""


@pytest.mark.skipif(_libgomp() is None, reason="PyTorch has another library of threads")
def test_nothing_is_chosen_once_an_upgrade_has_replaced_the_library(tmp_path: Path) -> None:
    """As of PyTorch in an environment in which a run goes on."""
    shutil.copy(str(_libgomp()), tmp_path / "libgomp.so.1")
    subprocess.run([sys.executable, "-c", _REPLACED, tmp_path / "libgomp.so.1"], check=True)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_a_policy_of_the_users_own_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    monkeypatch.setenv(name, "7")
    waiting = thread_waiting.__wrapped__()
    time.sleep(0.6)
    waiting.look()
    assert waiting.due == math.inf


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp of Linux")
def test_short_waits_change_no_bit(tmp_path_factory: pytest.TempPathFactory, two_threads: None) -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(0)
        args = TrainingArguments(
            str(tmp_path_factory.mktemp("run")), max_steps=4, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(Net(), args, train_dataset=rows(32))
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters()]

    expected = weights()
    lengthen = shorten_waits()
    assert lengthen is not None
    found = weights()
    lengthen()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
