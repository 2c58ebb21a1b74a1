"""Parameters that no batch uses, or not every batch, train on several processes as in one (`transforms/ddp.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.optional_parts_cases import SPLITS, Heads, train


@pytest.mark.dist
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    ranks = on_ranks(2, main, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        alone = train(tmp_path / "alone", SPLITS[1][0])
        torch.manual_seed(0)
        pooler = Heads().pooler.weight.flatten().tolist()
    finally:
        torch.set_default_dtype(torch.float32)
    assert ranks[0] == ranks[1]
    for weights in ranks[0]:
        assert weights.keys() == alone.keys()
        assert weights["pooler.weight"] == pooler, "a weight without gradients does not decay"
        for name, values in alone.items():
            assert weights[name] == pytest.approx(values, rel=1e-9), name


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main(folder: Path) -> list[dict[str, list[float]]]:
    torch.set_default_dtype(torch.float64)
    return [train(folder / "run", split) for split in SPLITS[2]]
