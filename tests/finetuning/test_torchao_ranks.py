"""Adapters on bases of torchao on two ranks: the reports of one process; shards are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
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
    ranks = on_ranks(2, main, name, tmp_path)
    alone = trainer(name, tmp_path / "alone")
    alone.train()
    for found in ranks:
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


def main(model: str, folder: Path) -> list[float]:
    run = trainer(model, folder / "run")
    run.train()
    return losses(run)
