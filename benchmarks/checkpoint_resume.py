"""What a resumed run waits for its data: from the start of the process to the end of its first update, at 1 % and at
99 % of an epoch.

One run of each kind is saved at both places; after that, fresh processes resume it from either, taking turns. The table
gives the fastest of each: whatever else a machine does only adds to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()  # before the heavy imports: they are part of what a user waits for

import numpy as np  # noqa: E402
import torch  # noqa: E402
from common import caption, facts, report, table  # noqa: E402
from torch import nn  # noqa: E402

from windlass import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

BATCH = 500
PLACES = {"1 %": 0.01, "99 %": 0.99}
KINDS = {
    "map-style": "map-style dataset",
    "datasets": "stream of `datasets`",
    "stateful": "stream with `state_dict`",
    "plain": "stream without a state (read again)",
}


class Rows:
    """Row i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": float(index), "labels": 0.0}


class PlainStream(torch.utils.data.IterableDataset[dict[str, float]]):
    """The rows in their order."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return (self.rows[index] for index in range(len(self.rows)))


class StatefulStream(PlainStream):
    """The same, from where its state says."""

    at = 0

    def __iter__(self) -> Iterator[dict[str, float]]:
        start, self.at = self.at, 0
        for index in range(start, len(self.rows)):
            self.at = index + 1
            yield self.rows[index]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def dataset(kind: str, samples: int) -> Any:
    if kind == "datasets":
        from datasets import Dataset

        columns = {"x": np.arange(samples, dtype=np.float32), "labels": np.zeros(samples, np.float32)}
        return Dataset.from_dict(columns).to_iterable_dataset(num_shards=16)
    return {"map-style": Rows, "stateful": StatefulStream, "plain": PlainStream}[kind](samples)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.mse_loss(self.layer(x.float()[:, None] / 1e6)[:, 0], labels.float()),)


class Saves(TrainerCallback):
    """Saves at these updates, and stops behind the last."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in self.steps
        control.should_training_stop = state.global_step >= self.steps[-1]


class Tells(TrainerCallback):
    """Says when the first update is done, counted from the start of the process and from `train()`; and stops."""

    called = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        print(f"seconds {now - STARTED} {now - self.called}", flush=True)
        control.should_training_stop = True


def trainer(folder: Path, kind: str, samples: int, callback: TrainerCallback) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        max_steps=samples // BATCH,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(Net(), arguments, train_dataset=dataset(kind, samples), callbacks=[callback])


def resume(checkpoint: Path, kind: str, samples: int) -> list[float]:
    """Seconds to the end of the first update behind `checkpoint`: from the start of a process, and from `train()`."""
    command = [
        sys.executable,
        __file__,
        "--resume",
        str(checkpoint),
        "--kind",
        kind,
        "--samples",
        str(samples),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or not said:
        raise SystemExit(f"resuming {checkpoint} failed:\n{done.stdout}\n{done.stderr}")
    return [float(word) for word in said[0].split()[1:]]


def measure(kind: str, samples: int, rounds: int) -> dict[str, list[float]]:
    """The fewest seconds by place: from the start of a process, and from `train()`."""
    steps = [max(int(samples * share) // BATCH, 1) for share in PLACES.values()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer(folder, kind, samples, Saves(steps)).train()
        seconds: dict[str, list[list[float]]] = {place: [] for place in PLACES}
        for turn in range(rounds + 1):
            for place, step in zip(PLACES, steps, strict=True):
                took = resume(folder / f"checkpoint-{step}", kind, samples)
                if turn:  # the first only warms the file cache
                    seconds[place].append(took)
    return {place: [min(column) for column in zip(*found, strict=True)] for place, found in seconds.items()}


def render(figures: dict[str, Any]) -> str:
    rows = []
    for kind, found in figures["fastest"].items():
        row = [KINDS[kind]]
        for early, late in zip(*found.values(), strict=True):
            row += [f"{early:.2f}", f"{late:.2f}", f"{late - early:+.2f}"]
        rows.append(row)
    columns = [*(f"at {place}, s" for place in PLACES), "difference, s"]
    head = [f"{figures['samples']:,} samples", *columns, *(f"from `train()`: {column}" for column in columns)]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time to the first resumed update, early and late in an epoch."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument(
        "--resume", type=Path, help="a checkpoint: resume it, say when its first update is done"
    )
    parser.add_argument("--write", type=Path, help="a page with a section `resume` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.resume is not None:
        tells = Tells()
        run = trainer(options.resume.parent, options.kind, options.samples, tells)
        tells.called = time.perf_counter()
        run.train(resume_from_checkpoint=str(options.resume))
        return
    kinds = KINDS if options.kind is None else [options.kind]
    fastest = {kind: measure(kind, options.samples, options.rounds) for kind in kinds}
    figures = {**facts(), "rounds": options.rounds, "samples": options.samples, "fastest": fastest}
    report("resume", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
