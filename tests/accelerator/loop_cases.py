"""Loops as scripts write them, each run by any number of processes; what they end with must not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from windlass import Accelerator, LossTerms
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin

BATCH, SAMPLES, WIDTH = 12, 55, 6
Result = dict[str, Tensor]


def regression() -> Dataset[Any]:
    """55 samples, so that batches of 12 end with one of 7, which no two processes share evenly."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(WIDTH, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y.sin())


def tiny(out: int = 1, inputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, out)).double()


def make(shard: bool, state: str = "FULL_STATE_DICT", **options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(state_dict_type=state) if shard else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def loader(accelerator: Accelerator, batch: int = BATCH, **options: Any) -> DataLoader[Any]:
    """A loader whose batch, over all processes, is `batch`."""
    return DataLoader(regression(), batch_size=batch // accelerator.num_processes, **options)


def whole(accelerator: Accelerator, *models: nn.Module) -> Result:
    states = [accelerator.get_state_dict(model) for model in models]
    return {
        f"{index}.{name}": value.clone()
        for index, state in enumerate(states)
        for name, value in state.items()
    }


def plain(shard: bool) -> Result:
    """The guides' loop: four lines differ from one process's."""
    torch.manual_seed(3)
    accelerator = make(shard)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(accelerator, shuffle=True))
    for _ in range(3):
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
    return whole(accelerator, model)


def accumulated(shard: bool) -> Result:
    """Three micro-batches of an update, clipped, with a schedule; the loader's end cuts the last update short."""
    torch.manual_seed(4)
    accelerator = make(shard, gradient_accumulation_steps=3, scheduler_unit="optimizer_step")
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule, data, optimizer, model = accelerator.prepare(
        schedule, loader(accelerator, shuffle=True), optimizer, model
    )
    norms = []
    for _ in range(4):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    rate = torch.tensor(schedule.get_last_lr(), dtype=torch.float64)
    return {**whole(accelerator, model), "norms": torch.stack(norms), "rate": rate}


def terms(shard: bool) -> Result:
    """Sums of losses over targets of which samples have different numbers, divided by the weight of the update."""
    torch.manual_seed(5)
    accelerator = make(shard, gradient_accumulation_steps=3)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(accelerator))
    gradients = []
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                weight = (x[:, :1] * 3).abs().floor()
                total = (F.mse_loss(model(x), y, reduction="none") * weight).sum()
                accelerator.backward(LossTerms(total, weight.sum()))
                if accelerator.sync_gradients:
                    gradients.append(accelerator.clip_grad_norm_(model.parameters(), 1e9))
                optimizer.step()
                optimizer.zero_grad()
    return {**whole(accelerator, model), "norms": torch.stack(gradients)}


def gan(shard: bool) -> Result:
    """Two models with an optimizer each; the generator's gradients pass through the discriminator."""
    torch.manual_seed(6)
    accelerator = make(shard)
    makes, judges = tiny(out=WIDTH, inputs=3), tiny()
    makes_optimizer = torch.optim.Adam(makes.parameters(), lr=0.02)
    judges_optimizer = torch.optim.Adam(judges.parameters(), lr=0.02)
    # In no particular order, and optimizers before their models.
    judges_optimizer, makes, makes_optimizer, data, judges = accelerator.prepare(
        judges_optimizer, makes, makes_optimizer, loader(accelerator), judges
    )
    for _ in range(2):
        for real, _ in data:
            noise = real[:, :3].sin()
            gan_step(accelerator.backward, makes, judges, makes_optimizer, judges_optimizer, real, noise)
    return whole(accelerator, makes, judges)


def gan_step(
    backward: Callable[[Tensor], Any],
    makes: nn.Module,
    judges: nn.Module,
    makes_optimizer: torch.optim.Optimizer,
    judges_optimizer: torch.optim.Optimizer,
    real: Tensor,
    noise: Tensor,
) -> None:
    """One update of each, as a script writes it."""
    judges_optimizer.zero_grad()
    false = makes(noise).detach()
    judged = judges(torch.cat([real, false]))
    wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(false), 1)]).to(judged)
    backward(F.binary_cross_entropy_with_logits(judged, wanted))
    judges_optimizer.step()
    makes_optimizer.zero_grad()
    judged = judges(makes(noise))
    backward(F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
    makes_optimizer.step()


CASES: dict[str, Callable[[bool], Result]] = {
    "plain": plain,
    "accumulated": accumulated,
    "terms": terms,
    "gan": gan,
}
