"""Loops on two ranks, replicated and sharded, against the same loops in one process."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.accelerator import loop_cases
from tests.dist.launch import launch, on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from windlass import Accelerator
from windlass.utils import DistributedDataParallelKwargs

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_ranks_end_as_one_process_does(tmp_path: Path) -> None:
    for name, case in loop_cases.CASES.items():
        save_file(case(False), tmp_path / f"{name}.safetensors")
    said = launch(2, HERE / "loop_ranks.py", tmp_path, timeout=500)
    assert said.count("LOOPS AGREE") == 2


@pytest.mark.dist
def test_what_fewer_processes_drop_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(2, main, tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model())
    logger = logging.getLogger("windlass")
    logger.addHandler(caplog.handler)
    try:
        accelerator.load_state(tmp_path / "saved")
    finally:
        logger.removeHandler(caplog.handler)
    dropped = "1.running_mean, 1.running_var, 1.num_batches_tracked"
    assert f"those of rank 0 are used, those of 1 further rank(s) are dropped: {dropped}" in caplog.text


# --- what each rank runs ----------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def main(folder: Path) -> None:
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", FutureWarning
        )  # PyTorch has another name for this option, and another meaning
        prepared = accelerator.prepare(model())
    prepared(torch.randn(8, 4) + accelerator.process_index)
    accelerator.save_state(folder)


@pytest.mark.dist
def test_a_batch_has_the_weight_of_its_own_loader_when_endless_loaders_take_turns() -> None:
    """The last batch of the other loader is short: one process has none of its samples."""
    assert on_ranks(2, gradient_between_turns) == [1.5, 1.5]


def gradient_between_turns() -> float:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    train, other = (DataLoader(TensorDataset(torch.arange(float(n))[:, None]), batch_size=1) for n in (4, 3))
    model, train, other = accelerator.prepare(model, train, other)
    batches, others = (itertools.chain.from_iterable(itertools.repeat(data)) for data in (train, other))
    next(batches)
    next(others)
    next(others)
    (x,) = next(batches)  # 2 on one process, 3 on the other
    accelerator.backward(model(x - 1).mean())
    return float(accelerator.unwrap_model(model).weight.grad)
