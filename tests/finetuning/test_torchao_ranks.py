"""Adapters on bases of torchao on two ranks: the reports of one process; shards are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.finetuning import small

from windlass import SFTTrainer
from windlass.core.errors import ConfigError

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torchao.quantization")

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


@pytest.mark.dist
def test_two_ranks_with_a_base_each_are_one_process(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=64)
    launch(2, Path(__file__), name, tmp_path)
    alone = trainer(name, tmp_path / "alone")
    alone.train()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(losses(alone), rel=1e-5)


def test_its_weights_are_not_sharded(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"fsdp=.*torchao.*use bitsandbytes"):
        trainer(name, tmp_path, fsdp="full_shard")


# --- what each rank runs ----------------------------------------------------------------------------------------------


def trainer(name: str, folder: Path, **changes: Any) -> SFTTrainer:
    import peft
    import torch
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    dtypes: Any = torch
    torch.manual_seed(0)
    return SFTTrainer(
        name,
        small.arguments(folder, per_device_train_batch_size=4 // WORLD, optim="sgd", **changes),
        train_dataset=small.table(small.texts(16)),
        quantization_config=TorchAoConfig(IntxWeightOnlyConfig(dtypes.int4, PerGroup(32))),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def losses(run: SFTTrainer) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def main() -> None:
    run = trainer(sys.argv[1], Path(sys.argv[2]) / "run")
    run.train()
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(losses(run)))


if __name__ == "__main__":
    main()
