"""Reads data that stops coming, in each of the ways in which data are read; for a Ctrl-C while nothing comes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests.trainer.small import Net, rows
from torch.utils.data import DataLoader, Dataset, IterableDataset

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.core.output import say


class Rows(Dataset[Any]):
    """Samples, of which one never comes."""

    def __init__(self, missing: int | None) -> None:
        self.rows, self.missing = rows(24), missing

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.missing:
            say("nothing comes")
            threading.Event().wait()
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, missing: int | None) -> None:
        self.rows = Rows(missing)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(24))


def train(kind: str, missing: int | None) -> None:
    in_evaluation = "evaluation" in kind
    args = TrainingArguments(
        "run",
        max_steps=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        dataloader_num_workers=0 if "alone" in kind else 1,
        dataloader_persistent_workers="persistent" in kind,
        dataloader_prefetch_factor=None if "alone" in kind else 2,
        eval_strategy="steps" if in_evaluation else "no",
        eval_on_start=kind == "first evaluation",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        train_sampling_strategy="sequential",
        use_cpu=True,
    )
    make = Stream if "stream" in kind else Rows
    data, held_out = make(None if in_evaluation else missing), Rows(missing if in_evaluation else None)
    trainer = Trainer(Net(), args, train_dataset=data, eval_dataset=held_out)
    if kind == "evaluate":
        trainer.eval_dataset = Rows(missing)
        trainer.evaluate()
    else:
        trainer.train(resume_from_checkpoint="auto")
    losses = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    print(f"ended at step {trainer.state.global_step}, evaluated at {losses}")


def loop(missing: int | None) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(Rows(missing), batch_size=4, num_workers=1)):
        pass
    print("ended")


if __name__ == "__main__":
    which = None if "whole" in sys.argv else 13
    if sys.argv[1] == "loop":
        loop(which)
    else:
        train(sys.argv[1], which)
