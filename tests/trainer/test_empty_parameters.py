"""Parameters without elements: every strategy and optimizer trains, clips, saves and resumes a model that has some."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import on_ranks
from tests.trainer import empty_ranks

OPTIMIZERS = [
    "adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "muon", "lion_32bit", "ademamix",
    "stable_adamw", "grokadamw", "adamw_anyprecision", "schedule_free_adamw", "galore_adamw", "galore_adafactor",
    "galore_adamw_8bit", "apollo_adamw", "lomo", "adalomo",
]  # fmt: skip


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_one_process(optim: str, tmp_path: Path) -> None:
    empty_ranks.train(tmp_path, "alone", optim)


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, empty_ranks.main, tmp_path, strategy, OPTIMIZERS[:3])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_every_optimizer(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, empty_ranks.main, tmp_path, strategy, OPTIMIZERS[3:])
