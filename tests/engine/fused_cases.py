"""Models, data and runs for updates inside the backward, in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback, TrainingArguments

GALORE: dict[str, Any] = {"optim_target_modules": ["mlp"], "optim_args": "rank=2, update_proj_gap=2"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp[1](torch.tanh(self.mlp[0](self.norm(x))))
        return out


class Tied(nn.Module):
    """Blocks between an embedding and a head of the same weight; the mean is over targets that are not -100."""

    def __init__(self, blocks: int = 2, width: int = 4, vocabulary: int = 7, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.drop(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def rows(count: int, length: int = 5) -> list[dict[str, Any]]:
    """Some rows have fewer targets than others."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (count, length), generator=generator)
    labels = ids.clone()
    for index, row in enumerate(labels):
        row[: index % 4] = -100
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


class Norms(TrainerCallback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))
            self.losses.append(float(logs["loss"]))


def run(
    folder: Path, optim: str, *, model: nn.Module | None = None, resume: bool = False, **changes: Any
) -> tuple[Trainer, Norms]:
    seen = Norms()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "learning_rate": 0.05, "max_steps": 5, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.0,
    } | changes  # fmt: skip
    args = TrainingArguments(str(folder), optim=optim, **settings)
    trainer = Trainer(Tied() if model is None else model, args, train_dataset=rows(22), callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


def assert_same(one: Trainer, other: Trainer, tolerance: float = 1e-12) -> None:
    from windlass.dist.sharded import whole

    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.detach()),
            whole(theirs.detach()),
            rtol=0,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
