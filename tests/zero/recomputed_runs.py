"""Run on ranks: trainings that recompute activations, and one with layers of experts; results.

Args: folder, then words `name:model:stage:steps` or `name:model:stage:steps:resume`; a stage of "-1" is without
DeepSpeed. Models: "blocks" (repeated blocks), "own" (DeepSpeed's own function recomputes) and "experts"; after
"own-" the name of its section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, rows, text_rows
from tests.zero.runs import WORLD, config
from torch import nn

from windlass import Trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(8, 8), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


class Blocks(nn.Module):
    """Args: own: recompute by DeepSpeed's function, which the model calls."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head, self.own = nn.Linear(4, 8), nn.Linear(8, 3), own
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = self._through(block, hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def _through(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        if not (self.own and torch.is_grad_enabled()):
            found: torch.Tensor = block(hidden)
            return found
        import deepspeed

        return deepspeed.checkpointing.checkpoint(block, hidden)  # type: ignore[no-any-return]


def experts() -> Any:
    import transformers

    torch.manual_seed(0)
    shape = transformers.MixtralConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        output_router_logits=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(shape)


SECTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "partitioned": {"partition_activations": True},
    "host": {"cpu_checkpointing": True},
    "both": {"partition_activations": True, "cpu_checkpointing": True},
    "contiguous": {"partition_activations": True, "contiguous_memory_optimization": True},
}


def trainer(folder: Path, model: str, stage: int, steps: int) -> Trainer:
    model, _, section = model.partition("-")
    changes: dict[str, Any] = {"gradient_checkpointing": model == "blocks"}
    zero: dict[str, Any] = {"stage": stage}
    if model == "experts":
        zero["leaf_module"] = {"classes": ["MixtralSparseMoeBlock"]}
    own = {"activation_checkpointing": {"number_checkpoints": 3, **SECTIONS[section]}}
    sections = own if model == "own" else {}
    if stage >= 0:
        changes |= config(stage, zero_optimization=zero, **sections)
    args = arguments(
        folder, per_device_train_batch_size=3, gradient_accumulation_steps=4 // WORLD, max_steps=steps,
        save_strategy="steps", save_steps=3,
        weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, learning_rate=0.01, lr_scheduler_type="constant",
        **changes,
    )  # fmt: skip
    if model == "experts":
        return Trainer(experts(), args, train_dataset=text_rows(80))
    return Trainer(Blocks(model == "own" and stage >= 0), args, train_dataset=rows(80))


def main(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
    for word in words:
        name, model, stage, steps, *resume = word.split(":")
        made = trainer(folder / name, model, int(stage), int(steps))
        made.train(resume_from_checkpoint=bool(resume))
        made.save_model()
        logged = [row for row in made.state.log_history if "loss" in row]
        found[name] = {key: [row[key] for row in logged] for key in ("loss", "grad_norm")}
    return found
