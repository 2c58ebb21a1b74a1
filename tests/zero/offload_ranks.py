"""Run on ranks: loops and a Trainer under a stage of ZeRO, with the optimizer's state somewhere; losses.

Args: folder, a stage (-1: without DeepSpeed), a device. A loop is a word: B is forward and backward of the next batch,
S a step, Z, R and M `zero_grad` of the prepared optimizer, of the script's own and of the model, P prepares again what
`free_memory` has given back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import rows
from tests.zero.runs import RANK, WORLD, config, told, trainer
from tests.zero.swapped_runs import Wide

from windlass import Accelerator
from windlass.core.errors import ModelError
from windlass.utils import DeepSpeedPlugin

CLEARED_AFTER, CLEARED_BEFORE = "BSZBSRBSMB", "ZBSRBSMBSZB"
GIVEN_UP, WITHOUT_GRADIENTS, AGAIN = "BSZBZBSZBBRBMBBSB", "BSZSBZSBSB", "BSZBSZPBSZB"
LOOPS = (CLEARED_AFTER, CLEARED_BEFORE, GIVEN_UP, WITHOUT_GRADIENTS, AGAIN)


def places(folder: Path, device: str) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}


def looped(folder: Path, stage: int, device: str, word: str) -> list[float]:
    """The losses of a loop."""
    fields = {f"offload_optimizer_{name}": value for name, value in places(folder, device).items()}
    plugin = DeepSpeedPlugin(zero_stage=stage, **fields) if stage >= 0 else None
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    module: Any = Wide()
    raw: Any = torch.optim.AdamW(module.parameters(), lr=0.003, weight_decay=0.1)
    model, optimizer = accelerator.prepare(module, raw)
    samples = rows(12 * word.count("B"))
    inputs = torch.stack([row["x"] for row in samples]).view(-1, WORLD, 12 // WORLD, 4)[:, RANK]
    labels = torch.tensor([row["labels"] for row in samples]).view(-1, WORLD, 12 // WORLD)[:, RANK]
    batches, losses = iter(zip(inputs, labels, strict=True)), []
    for letter in word:
        if letter == "B":
            x, y = next(batches)
            loss = model(x=x, labels=y)["loss"]
            accelerator.backward(loss)
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        elif letter == "S":
            optimizer.step()
        elif letter == "P":
            accelerator.free_memory()
            model, optimizer = accelerator.prepare(module, raw)
        else:
            {"Z": optimizer, "R": raw, "M": model}[letter].zero_grad(set_to_none=True)
    accelerator.free_memory()
    return losses


def trained(folder: Path, stage: int, device: str) -> list[float]:
    """The losses of a Trainer."""
    section = {"stage": stage, "offload_optimizer": places(folder / "files", device)}
    made = trainer(folder, stage=-1, steps=4, **config(stage, zero_optimization=section))
    made.train()
    return told(made)["loss"]  # type: ignore[no-any-return]


def refusal_of_closures() -> str:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    module: Any = Wide()
    _, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    try:
        optimizer.step(lambda: None)
    except ModelError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return "none"


def main(folder: Path, stage: int, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {word: looped(folder / word, stage, device, word) for word in LOOPS}
    found["Trainer"] = trained(folder, stage, device)
    if stage >= 0:
        found["closure"] = refusal_of_closures()
    return found
