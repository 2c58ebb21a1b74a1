"""Functions in many processes, called from a program as from a notebook."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ConfigError
from windlass.launchers import _cause, _traceback, debug_launcher, notebook_launcher


def test_signatures_are_those_that_notebooks_know() -> None:
    for ours, theirs in (
        (notebook_launcher, accelerate.notebook_launcher),
        (debug_launcher, accelerate.debug_launcher),
    ):
        expected = inspect.signature(theirs).parameters
        found = inspect.signature(ours).parameters
        assert list(found) == list(expected)
        assert {n: p.default for n, p in found.items()} == {n: p.default for n, p in expected.items()}


def test_one_process_is_this_one(tmp_path: Path) -> None:
    seen = []
    notebook_launcher(lambda word: seen.append((word, os.getpid())), ("here",), num_processes=1)
    assert seen == [("here", os.getpid())]


@pytest.mark.dist
def test_a_notebooks_function_runs_in_each_process_with_what_was_defined_here(tmp_path: Path) -> None:
    offset = 10  # found by the processes without being sent

    def train(write) -> None:  # type: ignore[no-untyped-def]
        accelerator = Accelerator()
        everyone = accelerator.gather(accelerator.process_index + offset_tensor(accelerator)).tolist()
        write(
            accelerator.process_index, f"{everyone} {accelerator.mixed_precision} {accelerator.device.type}"
        )

    def offset_tensor(accelerator: Accelerator):  # type: ignore[no-untyped-def]
        import torch

        return torch.tensor([offset], device=accelerator.device)

    before = signal.getsignal(signal.SIGINT)
    notebook_launcher(
        train,
        (lambda rank, text: (tmp_path / str(rank)).write_text(text),),
        num_processes=2,
        mixed_precision="bf16",
    )
    assert {path.name: path.read_text().split()[:3] for path in tmp_path.iterdir()} == {
        "0": ["[10,", "11]", "bf16"],
        "1": ["[10,", "11]", "bf16"],
    }
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.dist
def test_a_failure_comes_back_with_its_traceback(tmp_path: Path) -> None:
    def train(factor: int) -> None:
        accelerator = Accelerator()
        (tmp_path / str(accelerator.process_index)).write_text(accelerator.device.type)
        if accelerator.process_index == 1:
            raise ValueError(f"no {factor * 2}")

    with pytest.raises(RuntimeError, match="rank 1 failed") as caught:
        debug_launcher(train, (3,))
    assert "ValueError: no 6" in str(caught.value)
    assert 'raise ValueError(f"no {factor * 2}")' in str(caught.value)
    assert (tmp_path / "1").read_text() == "cpu"


def test_the_reported_failure_is_the_cause_of_the_others(tmp_path: Path) -> None:
    """A rank that waits for one that failed loses its connection within the same second."""
    texts = ("RuntimeError: gloo: Connection closed by peer [127.0.0.1]:1", "ValueError: planned")
    failures = {}
    for rank, text in enumerate(texts):
        file = tmp_path / f"{rank}.json"
        extra = {"py_callstack": text, "timestamp": "100"}
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        failures[rank] = ProcessFailure(rank, 1, 1, str(file))
    assert _cause(failures)[0] == 1
    assert _cause({0: failures[0]})[0] == 0, "the only one that is known"
    # Without a file: it has called sys.exit, or was ended.
    said = [_traceback(ProcessFailure(0, os.getpid(), code, str(tmp_path / "none"))) for code in (3, -9)]
    assert said[0] == "It wrote no traceback: see its output above."
    assert "SIGKILL" in said[1]


def test_what_is_wrong_is_said_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(
            print,
            num_processes=0,
            node_rank=3,
            mixed_precision="fp7",
            rdzv_backend="pigeon",
            max_restarts=-1,
            monitor_interval=0,
        )
    assert len(caught.value.problems) == 6
    with pytest.raises(ConfigError) as mistyped:
        notebook_launcher("train", 5, num_processes="2", node_rank=None, num_nodes=2)  # type: ignore[arg-type]

    def generates() -> Iterator[int]:
        yield 1

    async def waits() -> None:
        pass

    for function in (generates, waits):
        with pytest.raises(ConfigError, match="must be a plain function: a call of this one runs nothing"):
            debug_launcher(function)
    assert [one.field for one in mistyped.value.problems] == [
        "function",
        "args",
        "num_processes",
        "node_rank",
    ]
    assert "must be one of no, bf16, fp16, fp8" in str(caught.value)


_FROM_MAIN = """
    import dataclasses
    import torch, torch.nn.functional as F
    from windlass import Accelerator
    from windlass.launchers import debug_launcher
    from windlass.state import PartialState

    WIDTH = 300

    @dataclasses.dataclass
    class Options:
        rows: int = 512
        names: list = dataclasses.field(default_factory=list)

    class Net(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = torch.nn.Linear(width, width)

        def forward(self, x):
            return F.relu(self.inner(x))

    def loss_of(model, options):
        return model(torch.randn(options.rows, WIDTH)).pow(2).mean()

    def fails():
        raise ValueError("on purpose")

    @torch.enable_grad()
    def trains(options):
        assert [field.name for field in dataclasses.fields(options)] == ["rows", "names"]
        accelerator = Accelerator()
        torch.set_num_threads(2)
        model = accelerator.prepare(Net(WIDTH))
        for _ in range(3):
            accelerator.backward(loss_of(model, options))
        ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        if accelerator.is_main_process:
            print("trained on", ranks, WIDTH, flush=True)

    torch.set_num_threads(4)
    torch.randn(4_000_000).exp().sum()
    loss_of(Net(WIDTH), Options()).backward()  # threads of the autograd engine and of OpenMP
    PartialState()
    for function, args in ((fails, ()), (trains, (Options(rows=64),))):
        try:
            debug_launcher(function, args)
        except RuntimeError as error:
            print("failed:", str(error).strip().splitlines()[-1], flush=True)
"""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rdzv_endpoint": "localhost:99999"}, "rdzv_endpoint='localhost:99999': must be HOST:PORT"),
        (
            {"rdzv_conf": {"timeout": "long"}},
            "rdzv_conf['timeout']='long': must be a whole number of seconds",
        ),
        (
            {"rdzv_conf": {"read_timeout": 9}},
            "rdzv_conf['read_timeout']=9: is an option of torch's rendezvous",
        ),
    ],
)
def test_where_and_how_long_machines_wait_is_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        notebook_launcher(print, (), 2, num_nodes=2, **options)


@pytest.mark.slow
@pytest.mark.dist
def test_threads_and_failed_launches_of_this_process_do_not_reach_the_next_one(tmp_path: Path) -> None:
    """All is defined in `__main__`, which has no guard: the processes must not run it again."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_FROM_MAIN))
    found = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "4"},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["failed: ValueError: on purpose", "trained on [0, 1] 300"]


_NOTEBOOK = r"""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for cell in (
        "from windlass import Accelerator, debug_launcher",
        "offset = 10",
        "def shown(accelerator):\n    return accelerator.num_processes + offset",
        "def train():\n    if Accelerator().is_main_process:\n        raise ValueError(shown(Accelerator()))",
    ):
        shell.run_cell(cell, store_history=True).raise_error()
    result = shell.run_cell("debug_launcher(train)")
    print(result.error_in_exec)
"""


@pytest.mark.slow
@pytest.mark.dist
def test_functions_of_a_notebooks_cells_run_and_their_lines_are_in_the_traceback(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(textwrap.dedent(_NOTEBOOK))
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "ValueError: 12" in found.stdout
    assert "raise ValueError(shown(Accelerator()))" in found.stdout


def test_a_value_that_cannot_leave_this_process_is_named() -> None:
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match=r"train.*lock.*create .* inside the function"):
        debug_launcher(train)
