"""One run that saves, for `checkpoint.py`: prints what its saves cost as JSON.

`windlass`, `transformers` and `transformers, fsynced` train the same model with the same arguments; the last one
makes its files durable at the end of each save, as Windlass does. Started with a disk speed, whatever is written in the
background takes as long as a disk of that speed would.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, BATCH = 2048, 24, 8


class Net(nn.Module):
    """Linear layers of 100 M parameters in all; most of a step is their products."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = x
        for layer in self.layers:
            hidden = torch.relu(layer(hidden)) + x
        return {"loss": nn.functional.mse_loss(hidden, labels)}


class Noise:
    def __init__(self, width: int, count: int) -> None:
        self._width, self._count = width, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self._width), "labels": torch.randn(self._width)}


class Appearance(threading.Thread):
    """Notes when each checkpoint is first seen whole: when the last of its files appears. It must stay for a while."""

    def __init__(self, folder: Path, last_file: str) -> None:
        super().__init__(daemon=True)
        self._folder, self._last = folder, last_file
        self.seen: dict[int, float] = {}

    def run(self) -> None:
        while True:
            for path in self._folder.glob(f"checkpoint-*/{self._last}"):
                self.seen.setdefault(int(path.parent.name.split("-")[1]), time.perf_counter())
            time.sleep(0.01)


def fsync_all(folder: Path) -> None:
    """Make what a save wrote durable: every file, and the names of all of them."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def slow_down(bytes_per_second: float) -> None:
    """Every write of a background thread takes as long as a disk of this speed would."""
    from windlass.checkpoint.files import Files

    write = Files.write_some

    def slowly(files: Files, descriptor: int, piece: memoryview) -> int:
        time.sleep(len(piece) / bytes_per_second)
        return write(files, descriptor, piece)

    Files.write_some = slowly  # type: ignore[method-assign]


def libraries(name: str) -> tuple[Any, Any, Any]:
    if name == "windlass":
        from windlass import Trainer, TrainerCallback, TrainingArguments
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments
    return Trainer, TrainerCallback, TrainingArguments


def timer_of(base: type) -> Any:
    class Timer(base):  # type: ignore[misc]
        """When each step began and ended; between the two of a step and the next lies its save."""

        def __init__(self) -> None:
            self.begun: dict[int, float] = {}
            self.ended: dict[int, float] = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun[state.global_step] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ended[state.global_step] = time.perf_counter()

    return Timer()


def measure(
    name: str, saves: int, every: int, speed: float, size: tuple[int, int], folder: Path
) -> dict[str, Any]:
    trainer_class, callback, arguments = libraries(name)
    timer = timer_of(callback)
    steps = saves * every + every // 2
    args = arguments(
        output_dir=str(folder), max_steps=steps, save_steps=every, save_total_limit=3, logging_steps=10**6,
        per_device_train_batch_size=BATCH, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip

    class Fsynced(trainer_class):  # type: ignore[misc,valid-type]
        def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
            super()._save_checkpoint(model, trial)
            fsync_all(folder / f"checkpoint-{self.state.global_step}")
            durable[self.state.global_step] = time.perf_counter()

    durable: dict[int, float] = {}
    if speed:
        slow_down(speed)
    seen = Appearance(folder, "manifest.json" if name == "windlass" else "trainer_state.json")
    seen.start()
    torch.manual_seed(0)
    kind = Fsynced if name.endswith("fsynced") else trainer_class
    width, layers = size
    kind(Net(width, layers), args, train_dataset=Noise(width, steps * BATCH), callbacks=[timer]).train()
    stands = durable or seen.seen
    saved = [every * number for number in range(1, saves + 1)]
    return {
        "first_save": every,
        "blocked": [timer.begun[step] - timer.ended[step] for step in saved],
        "committed": [stands[step] - timer.ended[step] for step in saved],
        "steps": {step: timer.ended[step] - timer.begun[step - 1] for step in range(1, steps + 1)},
        "during": _during(timer, stands, saved),
    }


def _during(timer: Any, stands: dict[int, float], saved: list[int]) -> list[int]:
    """Steps that began and ended while a checkpoint was being written."""
    return [
        step
        for step, end in timer.ended.items()
        if any(timer.ended[save] < timer.begun[step - 1] and end < stands[save] for save in saved)
    ]


def main() -> None:
    name, saves, every, speed, width, layers, place = sys.argv[1:]
    folder = Path(place)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        figures = measure(name, int(saves), int(every), float(speed), (int(width), int(layers)), folder)
        print(json.dumps(figures), file=sys.__stdout__)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
