"""Parameters without elements: every strategy and optimizer trains, clips, saves and resumes a model that has some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.trainer.small import arguments, rows
from torch import Tensor, nn

from windlass import Accelerator, Trainer
from windlass.dist.sharded import local
from windlass.utils import FullyShardedDataParallelPlugin

OPTIMIZERS = [
    "adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "muon", "lion_32bit", "ademamix",
    "stable_adamw", "grokadamw", "adamw_anyprecision", "schedule_free_adamw", "galore_adamw", "galore_adafactor",
    "galore_adamw_8bit", "apollo_adamw", "lomo", "adalomo",
]  # fmt: skip


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_one_process(optim: str, tmp_path: Path) -> None:
    train(tmp_path, "alone", optim)


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path, strategy, OPTIMIZERS[:3])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_every_optimizer(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path, strategy, OPTIMIZERS[3:])


# --- what each rank runs ----------------------------------------------------------------------------------------------


PROJECTED = {"optim_target_modules": "all-linear", "optim_args": "rank=2"}


class Net(nn.Module):
    """Two parameters without elements, as of a model whose adapter or extra vocabulary has the size 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.nothing, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.inner(x))) + self.nothing.sum() + (x @ self.rows.T).sum()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder: Path, strategy: str, optim: str) -> None:
    """Check that the second half of a run, resumed, has the same losses and weights; with clipped gradients."""
    changes: dict[str, Any] = {"fsdp": True} if strategy == "fsdp" else {}
    if optim.startswith(("galore", "apollo")):
        changes |= PROJECTED
    losses, weights = [], []
    for resume in (None, str(folder / "checkpoint-2")):
        args = arguments(
            folder,
            optim=optim,
            save_strategy="steps",
            save_steps=2,
            logging_steps=1,
            max_grad_norm=0.1,
            **changes,
        )
        made = Trainer(Net(), args, train_dataset=rows(40))
        made.train(resume_from_checkpoint=resume)
        made.save_model(str(folder / "model"))
        made.accelerator.wait_for_everyone()
        losses.append([row["loss"] for row in made.state.log_history if "loss" in row])
        weights.append(load_file(folder / "model" / "model.safetensors"))
    assert losses[0] == losses[1]
    whole, resumed = weights
    assert whole.keys() == resumed.keys() == dict(Net().named_parameters()).keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(whole["head.weight"], Net().head.weight)


class Derived(torch.optim.AdamW):
    """An optimizer of a script."""


def check_lists_of_tensors() -> None:
    """Kernels over lists, the default on accelerators: a loop's own optimizers have the parts that they have singly."""
    found = []
    for options in ({"foreach": True}, {"foreach": False}):
        for cls in (torch.optim.SGD, Derived):
            accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
            model: Any = Net()
            optimizer: Any = cls(model.parameters(), lr=0.1, **options)
            model, optimizer = accelerator.prepare(model, optimizer)
            for row in rows(2):
                labels = torch.tensor([row["labels"]])
                accelerator.backward(model(x=row["x"][None], labels=labels)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            found.append([local(p).detach() for p in model.parameters()])
            accelerator.free_memory()
    assert all(map(torch.equal, found[0] + found[1], found[2] + found[3]))


def main(folder: Path, strategy: str, optimizers: list[str]) -> None:
    """Train with each optimizer on "ddp" or "fsdp", whole and resumed from its middle."""
    if strategy == "fsdp":
        check_lists_of_tensors()
    for name in optimizers:
        train(folder / name, strategy, name)
