"""Run on ranks: loops of the user's own under DeepSpeed and without; their losses and weights.

Words of `loop`: a stage, "-1" without DeepSpeed, or "file" for a configuration with placeholders.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import rows
from tests.zero.runs import Net
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.core.errors import ConfigError, ModelError
from windlass.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from windlass.zero.library import make_schedule

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FILE = {
    "zero_optimization": {"stage": 2},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def data() -> DataLoader[Any]:
    samples = rows(56)
    stacked = [{"x": row["x"], "labels": torch.tensor(row["labels"])} for row in samples]
    return DataLoader(stacked, batch_size=8 // WORLD)  # type: ignore[arg-type]


def make(kind: str, folder: Path) -> tuple[Accelerator, Any, Any, Any, Any]:
    plugin = None
    if kind == "file":
        plugin = DeepSpeedPlugin(hf_ds_config=FILE)
    elif int(kind) >= 0:
        plugin = DeepSpeedPlugin(zero_stage=int(kind))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin, project_dir=str(folder),
        scheduler_unit="optimizer_step",
    )  # fmt: skip
    model = Net()
    if kind == "file":
        optimizer: Any = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)
        schedule: Any = DummyScheduler(optimizer, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        # As DeepSpeed's WarmupLR, whose first two updates have the least rate.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(max(step - 1, 0) / 3, 1.0))
    return accelerator, *accelerator.prepare(model, optimizer, schedule, data())


def refused_options() -> list[str]:
    """What is said of schedules with an option that they do not have, and without one that they need."""
    optimizer, said = torch.optim.SGD(Net().parameters(), lr=0.1), []
    for kind, options in (("WarmupLR", {"warmup_steps": 3}), ("WarmupCosineLR", {"warmup_num_steps": 3})):
        try:
            make_schedule(optimizer, {"type": kind, "params": options})
        except ConfigError as error:
            said.append(str(error))
    return said


def train(parts: tuple[Any, ...], updates: int, clips: bool) -> tuple[list[float], list[float]]:
    """Losses and norms. A pass has 7 micro-batches, so its last update has one."""
    accelerator, model, optimizer, schedule, loader = parts
    losses: list[float] = []
    norms: list[float] = []
    made = 0
    while made < updates:
        for batch in loader:
            with accelerator.accumulate(model):
                # A backward adds to the one before it also if no forward lies between them.
                halves = [{name: value[start::2] for name, value in batch.items()} for start in (0, 1)]
                parts_of_loss = [model(**half)["loss"] / 2 for half in halves]
                for part in parts_of_loss:
                    accelerator.backward(part)
                loss = sum(parts_of_loss)
                if accelerator.sync_gradients and clips:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            made += accelerator.sync_gradients
            if made == updates:
                break
    return losses, norms


def backward_again(stage: int) -> str:
    """What is said of a second backward through a graph that was kept."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = Net()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loss = model(**next(iter(data())))["loss"]
    accelerator.backward(loss, retain_graph=True)
    try:
        accelerator.backward(loss * 2)
    except ModelError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""


def loop(kind: str, folder: Path) -> dict[str, Any]:
    parts = make(kind, folder)
    accelerator, model = parts[:2]
    losses, norms = train(parts, 5, clips=kind != "file")
    accelerator.save_state(str(folder / f"state{kind}"))
    further = train(parts, 4, clips=kind != "file")
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(folder / f"model{kind}"))
    accelerator.load_state(str(folder / f"state{kind}"))
    again = train(parts, 4, clips=kind != "file")
    assert again == further, "a loaded state continues to the same bits"
    accelerator.free_memory()
    return {
        "losses": losses + further[0],
        "norms": norms + further[1],
        "weights": {name: value.flatten().tolist() for name, value in state.items()},
        "type": str(accelerator.distributed_type),
    }


def grouped(stage: int, folder: Path) -> dict[str, Any]:
    """Updates with a schedule for each group, of which the first has frozen parameters alone and the second none."""
    plugin = DeepSpeedPlugin(zero_stage=stage) if stage >= 0 else None
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = Net()
    members = [
        [model.inner.bias],
        [],
        [model.inner.weight, *model.norm.parameters()],
        [*model.head.parameters()],
    ]
    groups = [{"params": own, "lr": 0.01 * (index + 1)} for index, own in enumerate(members)]
    optimizer: Any = torch.optim.AdamW(groups)
    shapes = [lambda step, own=index: (own + 1) ** -step for index in range(4)]
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, shapes)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, data())
    rates = []
    for batch in itertools.islice(loader, 4):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
    accelerator.save_state(str(folder))
    schedule.step()
    accelerator.load_state(str(folder))
    rates.append([group["lr"] for group in optimizer.param_groups])
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return {"rates": rates, "weights": {name: value.flatten().tolist() for name, value in state.items()}}
