"""Parameters that no batch uses, or not every batch, train on several processes as in one (`transforms/ddp.py`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from tests.trainer.optional_parts_cases import SPLITS, Heads, train

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    launch(2, Path(__file__), tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        alone = train(tmp_path / "alone", SPLITS[1][0])
        torch.manual_seed(0)
        pooler = Heads().pooler.weight.flatten().tolist()
    finally:
        torch.set_default_dtype(torch.float32)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for weights in ranks[0]:
        assert weights.keys() == alone.keys()
        assert weights["pooler.weight"] == pooler, "a weight without gradients does not decay"
        for name, values in alone.items():
            assert weights[name] == pytest.approx(values, rel=1e-9), name


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main() -> None:
    torch.set_default_dtype(torch.float64)
    place, rank = Path(sys.argv[1]), os.environ["RANK"]
    found = [train(place / "run", split) for split in SPLITS[2]]
    (place / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
