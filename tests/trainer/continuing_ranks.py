"""Run on ranks: two ranks continue what one process of transformers' Trainer began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import open_tensors
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import is_sharded, whole

RANK = int(os.environ.get("RANK", "0"))


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(folder: Path, **changes: Any) -> Trainer:
    args = arguments(
        folder, max_steps=-1, num_train_epochs=2, weight_decay=0.1, warmup_steps=2, learning_rate=0.01,
        per_device_train_batch_size=2, **changes,
    )  # fmt: skip
    return InOrder(model=Net(), args=args, train_dataset=rows(18))


def continued(folder: Path, name: str, **changes: Any) -> None:
    run = trainer(folder / name, **changes)
    run.train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-3"))
    assert run.state.global_step == 10
    assert is_sharded(run.model.layer.weight) == bool(changes)
    with open_tensors(folder / "end.safetensors", Files()) as file:
        for key, parameter in run.model.named_parameters():
            torch.testing.assert_close(whole(parameter.detach()).cpu(), file.read(key), rtol=0, atol=1e-6)


def broken_on_all(folder: Path) -> None:
    """What the main process finds broken, all of them hear of."""
    if RANK == 0:
        (folder / "theirs" / "checkpoint-4" / "optimizer.pt").write_bytes(b"PK\x03\x04")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        trainer(folder / "broken").train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-4"))


def main(folder: Path) -> None:
    continued(folder, "replicated")
    continued(folder, "sharded", fsdp="full_shard")
    broken_on_all(folder)
    trainer(folder / "end").end()
