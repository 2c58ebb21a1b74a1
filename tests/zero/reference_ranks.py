"""Run on ranks: a loop that trains a model beside a frozen reference model; losses and weights.

Words of `loop`: a stage, "-1" without DeepSpeed, or "2+3" for two named configurations, that of the
trained model and that of the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.zero.loop_ranks import data
from tests.zero.runs import Net
from torch import nn

from windlass import Accelerator
from windlass.utils import DeepSpeedPlugin


def reference() -> nn.Module:
    made = Net()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.requires_grad_(False).eval()


def prepared(word: str) -> tuple[Accelerator, Any, Any, Any, Any]:
    stages = [int(stage) for stage in word.split("+")]
    plugins = [DeepSpeedPlugin(zero_stage=stage) for stage in stages if stage >= 0]
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        deepspeed_plugin=plugins[0] if len(plugins) == 1 else None,
        deepspeed_plugins=dict(zip(("student", "teacher"), plugins, strict=True))
        if len(plugins) > 1
        else None,
    )
    model, frozen = Net(), reference()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    if len(plugins) < 2:
        return accelerator, *accelerator.prepare(model, frozen, optimizer, data())
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    accelerator.state.select_deepspeed_plugin("teacher")
    return accelerator, model, accelerator.prepare(frozen), optimizer, loader


def loop(word: str, folder: Path) -> dict[str, Any]:
    accelerator, model, frozen, optimizer, loader = prepared(word)
    losses: list[float] = []

    def train(updates: int) -> list[float]:
        found, made = [], 0
        while made < updates:
            for batch in loader:
                with accelerator.accumulate(model):
                    output = model(**batch)
                    with torch.no_grad():
                        target = frozen(**batch)["logits"].softmax(-1)
                    away = nn.functional.kl_div(
                        output["logits"].log_softmax(-1), target, reduction="batchmean"
                    )
                    loss = output["loss"] + away
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(float(accelerator.reduce(loss.detach(), "mean")))
                made += accelerator.sync_gradients
                if made == updates:
                    break
        return found

    losses = train(4)
    accelerator.save_state(str(folder / f"state{word}"))
    further = train(3)
    weights = [accelerator.get_state_dict(one) for one in (model, frozen)]
    divided = [any(hasattr(p, "ds_id") for p in one.parameters()) for one in (model, frozen)]
    accelerator.load_state(str(folder / f"state{word}"))
    assert train(3) == further, "a loaded state continues to the same bits"
    return {
        "losses": losses + further,
        "weights": [{name: value.flatten().tolist() for name, value in one.items()} for one in weights],
        "divided": divided,
    }
