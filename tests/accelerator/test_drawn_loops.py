"""Loops with drawn options end as with the real accelerate: losses, rates, norms, what is gathered, and weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import windlass
import windlass.utils

CASES = 24


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (
            torch.randn(count, 6, generator=generator),
            torch.randn(count, 1, generator=generator),
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "id": index}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


SCHEDULES: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=400),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    "adam": lambda p: [torch.optim.Adam(p, lr=0.05, amsgrad=True)],
    "two": lambda p: [torch.optim.SGD(p[:2], lr=0.1), torch.optim.AdamW(p[2:], lr=0.05)],
}


def draw(seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    options: dict[str, list[Any]] = {
        "batch": [1, 2, 3, 4, 5, 6, 7], "accumulation": [1, 2, 3, 5], "epochs": [1, 2, 3], "skip": [0, 1, 2],
        "data": ["plain", "batches", "stream", "drop"], "schedule": list(SCHEDULES), "optimizer": list(OPTIMIZERS),
        "clip": ["", "norm", "value"], "precision": ["no", "no", "bf16"], "saves": [False, True],
        "split_batches": [False, True], "dispatch_batches": [None, False, True], "with_optimizer": [False, True],
        "adjust_scheduler": [False, True], "sync_with_dataloader": [False, True], "accumulates": [False, True],
    }  # fmt: skip
    case = {name: drawn.choice(values) for name, values in options.items()}
    # With fewer, no batch is left to skip, which accelerate does not bear when it dispatches.
    return {**case, "rows": 3 * case["batch"] + drawn.randint(0, 20)}


def loader(case: dict[str, Any]) -> DataLoader[Any]:
    rows, batch = Rows(case["rows"]), case["batch"]
    if case["data"] == "batches":
        return DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), batch, drop_last=False))
    if case["data"] == "stream":
        return DataLoader(Stream(rows), batch_size=batch)
    return DataLoader(rows, batch_size=batch, drop_last=case["data"] == "drop")


def run(library: Any, case: dict[str, Any], folder: Path) -> list[tuple[str, list[Any]]]:
    """The loop, and what it saw: names and numbers."""
    library.utils.set_seed(3)
    plugin = library.utils.GradientAccumulationPlugin(
        case["accumulation"], case["adjust_scheduler"], case["sync_with_dataloader"]
    )
    accelerator = library.Accelerator(
        cpu=True,
        mixed_precision=case["precision"],
        gradient_accumulation_plugin=plugin,
        step_scheduler_with_optimizer=case["with_optimizer"],
        dataloader_config=library.utils.DataLoaderConfiguration(
            split_batches=case["split_batches"], dispatch_batches=case["dispatch_batches"]
        ),
    )
    bare = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = OPTIMIZERS[case["optimizer"]](list(bare.parameters()))
    schedule = SCHEDULES[case["schedule"]](optimizers[0])
    model, data, test, schedule, *optimizers = accelerator.prepare(
        bare, loader(case), DataLoader(Rows(11), batch_size=4), schedule, *optimizers
    )
    seen: list[tuple[str, list[Any]]] = []

    def micro_step(batch: dict[str, Tensor]) -> None:
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        accelerator.backward(loss)
        if accelerator.sync_gradients and case["clip"] == "norm":
            seen.append(("norm", [float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]))
        if accelerator.sync_gradients and case["clip"] == "value":
            accelerator.clip_grad_value_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        schedule.step(*([1.0] if case["schedule"] == "plateau" else []))
        for optimizer in optimizers:
            optimizer.zero_grad()
        rate, syncs = optimizers[0].param_groups[0]["lr"], float(accelerator.sync_gradients)
        seen.append(("loss", [float(accelerator.reduce(loss.detach(), "mean")), rate, syncs]))

    for epoch in range(case["epochs"]):
        for batch in accelerator.skip_first_batches(data, case["skip"]) if epoch == 0 else data:
            if case["accumulates"]:
                with accelerator.accumulate(model):
                    micro_step(batch)
            else:
                micro_step(batch)
        with torch.no_grad():
            for batch in test:
                errors = (model(batch["x"]) - batch["y"]).squeeze(-1)
                gathered = accelerator.gather_for_metrics((errors, batch["id"]))
                seen.append(("errors", [*gathered[0].tolist(), *gathered[1].tolist()]))
        if case["saves"]:
            accelerator.save_state(str(folder / f"{library.__name__}{epoch}"))
            accelerator.load_state(str(folder / f"{library.__name__}{epoch}"))
    weights = [float(p.detach().double().sum()) for p in accelerator.unwrap_model(model).parameters()]
    return [*seen, ("weights", weights)]


@pytest.mark.parametrize("seed", range(CASES))
def test_a_drawn_loop_ends_as_with_accelerate(seed: int, tmp_path: Path) -> None:
    case = draw(seed)
    try:
        want = run(accelerate, case, tmp_path)
    finally:  # it keeps its settings in singletons
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
    found = run(windlass, case, tmp_path)
    assert [name for name, _ in found] == [name for name, _ in want], case
    for (name, mine), (_, theirs) in zip(found, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5), (name, case)
