"""Law 4: in a step that does not log, no frame of Windlass makes the host wait for the device.

Counted where it happens: a dispatch mode sees every operation that hands a device's value to the host, and the
innermost frame outside torch says whose it is. On the CPU nothing waits, but the operations are the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import windlass
from windlass import Accelerator, LossTerms, Trainer, TrainerCallback, TrainingArguments
from windlass.core import host

OURS = str(Path(windlass.__file__).parent)
REFUSES_DEVICES = host.__file__  # reads host memory alone; a tensor anywhere else is an error there
TORCH = str(Path(torch.__file__).parent)
OPTIMIZERS = str(Path(torch.optim.__file__).parent)
# Operations whose result is a number, or whose shape depends on values.
SYNCS = {
    "aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.allclose", "aten.nonzero",
    "aten.masked_select", "aten.unique", "aten.unique_consecutive", "aten._unique2", "aten.unique_dim",
}  # fmt: skip
STEPS = 12


class Count:
    """Waits by the place that asked for them, counted while `armed`."""

    def __init__(self) -> None:
        self.armed = False
        self.ours: Counter[str] = Counter()
        self.all: Counter[str] = Counter()

    def add(self, what: str, frame: FrameType | None) -> None:
        asker = _asker(frame)
        if not self.armed or asker is None:
            return
        place = f"{what} at {asker.f_code.co_filename}:{asker.f_lineno}"
        self.all[place] += 1
        if asker.f_code.co_filename.startswith(OURS) and asker.f_code.co_filename != REFUSES_DEVICES:
            self.ours[place] += 1


def _asker(frame: FrameType | None) -> FrameType | None:
    """Innermost frame outside torch and the modes below: who wrote the line that waits.

    None for what torch's optimizers do by themselves.
    """
    modes = (Operations.__torch_dispatch__.__code__, Copies.__torch_function__.__code__)
    while frame is not None and (frame.f_code.co_filename.startswith(TORCH) or frame.f_code in modes):
        if frame.f_code.co_filename.startswith(OPTIMIZERS):
            return None
        frame = frame.f_back
    return frame


class Operations(TorchDispatchMode):
    """Sees the operations themselves, hidden ones too."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func.overloadpacket)) in SYNCS:
            self._count.add(name, sys._getframe(1))
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Sees `.cpu()`, `.to("cpu")` and `.tolist()` as they are written: on the CPU no operation shows them."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cpu", "tolist") or (name == "to" and "cpu" in map(str, args[1:2])):
            self._count.add(f"Tensor.{name}", sys._getframe(1))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """A classifier; `where_it_waits` is called in its forward, to show that the law would see it."""

    def __init__(self, where_it_waits: Callable[[torch.Tensor], Any] = lambda loss: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.where_it_waits = where_it_waits

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits, labels)
        self.where_it_waits(loss)
        return {"loss": loss, "logits": logits}


class Window(TrainerCallback):
    """Counts in the steps between the first, which probes the loss, and the last, which reports."""

    def __init__(self, counted: Count, first: int = 3, last: int = STEPS - 2) -> None:
        self._counted, self._first, self._last = counted, first, last
        self.steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counted.armed = self._first <= state.global_step < self._last
        self.steps += self._counted.armed

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counted.armed = False


def _train(folder: Path, net: nn.Module, trainer_class: type[Trainer] = Trainer, **options: Any) -> Count:
    data = [{"x": torch.randn(4), "labels": i % 2} for i in range(64)]
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1000, "save_strategy": "no", **options,
    }  # fmt: skip
    counted = Count()
    window = Window(counted)
    args = TrainingArguments(str(folder), **settings)
    trainer = trainer_class(net, args, train_dataset=data, callbacks=[window])
    with Copies(counted), Operations(counted):
        trainer.train()
    assert window.steps == STEPS - 5
    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"max_grad_norm": 0.0},
        {"weight_decay": 0.1, "optim": "adamw_torch", "lr_scheduler_type": "cosine"},
        {"optim": "sgd", "activation_checkpointing": True},
        {"include_num_input_tokens_seen": "all"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_no_sync_in_a_step_that_does_not_log(tmp_path: Path, options: dict[str, Any]) -> None:
    counted = _train(tmp_path, Net(), **options)
    assert not counted.ours, counted.ours


def test_no_sync_with_an_overridden_loss(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    assert not _train(tmp_path, Net(), Own).ours


@pytest.mark.parametrize("terms", [False, True])
def test_no_sync_in_a_loop_of_the_users_own(terms: bool) -> None:
    """Batches, accumulation, clipping, update and schedule, with plain losses and with sums and weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_unit="optimizer_step")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = DataLoader(TensorDataset(torch.randn(15, 4)), batch_size=2)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    counted = Count()
    counted.armed = True
    with Copies(counted), Operations(counted):
        for (x,) in data:
            with accelerator.accumulate(model):
                loss = model(x).square()
                accelerator.backward(LossTerms(loss.sum(), len(x)) if terms else loss.mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                accelerator.gather_for_metrics(x)
    # Batches move to the loop's device, which is the CPU here.
    waits = [place for place in counted.ours if not place.startswith("Tensor.to at")]
    assert not waits, waits


def test_a_step_that_logs_waits_at_most_once(tmp_path: Path) -> None:
    counted = _train(tmp_path, Net(), logging_steps=1)
    assert sum(counted.ours.values()) <= STEPS - 5, counted.ours


@pytest.mark.parametrize(
    "wait", [torch.Tensor.item, lambda loss: bool(loss > 1e9), torch.Tensor.tolist, torch.Tensor.cpu]
)
def test_the_law_sees_a_wait(tmp_path: Path, wait: Callable[[torch.Tensor], Any]) -> None:
    """Not ours here, but counted: a wait in the user's own forward shows up among all."""
    counted = _train(tmp_path, Net(wait))
    assert sum(n for place, n in counted.all.items() if __file__ in place) >= STEPS - 5
    assert not counted.ours
