"""Functions in many processes, called from a program as from a notebook."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path

import accelerate
import pytest

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ConfigError
from windlass.launchers import debug_launcher, notebook_launcher


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


def test_what_is_wrong_is_said_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(print, num_processes=0, node_rank=3, mixed_precision="fp7", rdzv_backend="pigeon")
    assert len(caught.value.problems) == 4
    assert "must be one of no, fp16, bf16" in str(caught.value)
