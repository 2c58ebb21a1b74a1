"""Two processes: float8 on a replicated and on a sharded model gives the losses of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from windlass import Trainer, TrainingArguments
from windlass.core.world import world_from_environment


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.product(x))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x.float() - labels).square().mean()}


def train(folder: Path, rows: int, **options: Any) -> list[float]:
    """Losses of three updates of 8 rows; saves the model."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": x, "labels": x.flip(0)} for x in torch.randn(32, 32, generator=generator)]
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=rows, learning_rate=0.5, optim="sgd", logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", fp8=True,
        fp8_config={"emulate": True, "recipe": "rowwise_with_gw_hp"},
        **options,
    )  # fmt: skip
    trainer = Trainer(Network(), args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    assert {type(block.product).__name__ for block in trainer.model.layers[1:3]} == {"Float8Linear"}
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    sharding = {"fsdp": True, "fsdp_config": {"transformer_cls_names_to_wrap": ["Block"]}}
    found = train(Path(sys.argv[1]), 4, **(sharding if sys.argv[2] == "sharded" else {}))
    if world_from_environment().rank == 0:
        print("losses", json.dumps(found))
