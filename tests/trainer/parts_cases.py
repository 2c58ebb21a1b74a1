"""Streams that split themselves as PyTorch's documentation shows, and some that must not be taken for it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from windlass import Trainer, TrainerCallback, TrainingArguments

COUNT = 21  # uneven over two ranks


def sample(index: int) -> dict[str, Any]:
    values = torch.tensor([index % 5, index % 3, 1.0])
    return {"x": values / 5, "labels": torch.tensor(float(index % 7)), "index": index}


class Whole(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(COUNT))


class ByRank(IterableDataset[Any]):
    """Looks at the process group."""

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(dist.get_rank(), COUNT, dist.get_world_size()))


class ByNode(ByRank):
    """As `datasets.distributed.split_dataset_by_node` leaves it."""

    _distributed = True


class Sized(ByRank):
    def __len__(self) -> int:
        return len(range(dist.get_rank(), COUNT, dist.get_world_size()))


class ByRankAndWorker(IterableDataset[Any]):
    """Looks at the launcher's variables and at the worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = int(os.environ.get("RANK", 0)) * workers + worker
        return map(sample, range(first, COUNT, int(os.environ.get("WORLD_SIZE", 1)) * workers))


class Shuffled(ByRank):
    """Every rank shuffles the whole alike, from the default generator, and takes its part."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(COUNT))
        random.shuffle(order)
        return map(sample, order[dist.get_rank() :: dist.get_world_size()])


class OfItsOwnRandomness(IterableDataset[Any]):
    """In another order on every rank and in every pass."""

    def __init__(self) -> None:
        self.generator = random.Random(int(os.environ.get("RANK", 0)))

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.generator.sample(range(COUNT), COUNT))


class ReadOnce(IterableDataset[Any]):
    """A generator: what was read of it is gone."""

    def __init__(self) -> None:
        self.samples = map(sample, range(COUNT))

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class EndsEarly(IterableDataset[Any]):
    """The same samples on every rank, as far as they go."""

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(COUNT - 8 * dist.get_rank()))


class NothingForTheLast(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(COUNT) if dist.get_rank() == 0 else ())


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.layer(x).squeeze(-1)
        return {"logits": out} if labels is None else {"loss": (out - labels).square().mean(), "logits": out}


class InAStep(TrainerCallback):
    """Tells steps from what is computed beside them, to find out what a loss is."""

    now = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.now = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.now = False


class Noting(Trainer):
    """Notes the samples of every update."""

    step: InAStep
    seen: list[int]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        index = inputs.pop("index").tolist()
        if self.step.now:
            self.seen += index
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def trainer_for(folder: Path, stream: Any, **changes: Any) -> Noting:
    torch.manual_seed(0)
    parts = {name: changes.pop(name) for name in ("eval_dataset", "compute_metrics") if name in changes}
    chosen: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "ddp_timeout": 60,
        "remove_unused_columns": False,
    }
    args = TrainingArguments(output_dir=str(folder), **{**chosen, **changes})
    trainer = Noting(Line(), args, train_dataset=stream, **parts)
    trainer.step, trainer.seen = InAStep(), []
    trainer.add_callback(trainer.step)
    return trainer
