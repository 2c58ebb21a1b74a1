"""The contenders of `overhead.py`: one tiny model, one dataset, five loops.

Started by it as `contenders.py NAME STEPS`; answers each line on stdin with the stamps of one round (ns) on stdout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

BATCH, FEATURES, CLASSES, SAMPLES = 8, 64, 10, 20_000
LEARNING_RATE, CLIP, LOG_EVERY = 1e-3, 1.0, 100
Stamps = list[int]


class Model(nn.Module):
    """A small classifier that notes the time of each call, so that every loop is timed by the same clock."""

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.stamps = stamps
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.stamps.append(time.perf_counter_ns())
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Samples(Dataset[dict[str, Tensor]]):
    """Random features with random labels, in memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def _loader(samples: Samples) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(samples, batch_size=BATCH, shuffle=True, collate_fn=default_collate)


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def raw(model: nn.Module, samples: Samples, steps: int) -> None:
    """The loop that a person would write, with clipping and a loss that is read when it is logged."""
    optimizer, total, step = _optimizer(model), torch.zeros(()), 0
    model.train()
    while step < steps:
        for batch in _loader(samples):
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                print({"step": step, "loss": total.item() / LOG_EVERY})
                total.zero_()
            if step == steps:
                return


def accelerate(model: nn.Module, samples: Samples, steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, _optimizer(model), _loader(samples))
    total, step = torch.zeros(()), 0
    prepared.train()
    while step < steps:
        for batch in loader:
            loss = prepared(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                print({"step": step, "loss": total.item() / LOG_EVERY})
                total.zero_()
            if step == steps:
                return


def lightning(model: nn.Module, samples: Samples, steps: int) -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self)

    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, gradient_clip_val=CLIP, log_every_n_steps=LOG_EVERY,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(samples))


def _trainer(library: Any, model: nn.Module, samples: Samples, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            optim="adamw_torch_fused", max_grad_norm=CLIP, logging_steps=LOG_EVERY, save_strategy="no",
            remove_unused_columns=False, disable_tqdm=True, use_cpu=True, report_to="none",
        )  # fmt: skip
        trainer = library.Trainer(model, arguments, train_dataset=samples, data_collator=default_collate)
        trainer.train()


def transformers(model: nn.Module, samples: Samples, steps: int) -> None:
    import transformers as library

    _trainer(library, model, samples, steps)


def windlass(model: nn.Module, samples: Samples, steps: int) -> None:
    import windlass as library

    _trainer(library, model, samples, steps)


LOOPS: dict[str, Callable[[nn.Module, Samples, int], None]] = {
    "raw": raw, "windlass": windlass, "accelerate": accelerate, "lightning": lightning, "transformers": transformers,
}  # fmt: skip


def _round(loop: Callable[[nn.Module, Samples, int], None], samples: Samples, steps: int) -> Stamps:
    stamps: Stamps = []
    torch.manual_seed(0)
    # The pipe carries figures alone: whatever a library prints goes nowhere.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        loop(Model(stamps), samples, steps)
    return stamps


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    if name != "raw" and importlib.util.find_spec(name) is None:
        print(json.dumps("missing"), flush=True)
        return
    torch.set_num_threads(1)
    samples = Samples()
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(_round(LOOPS[name], samples, steps)), flush=True)


if __name__ == "__main__":
    main()
