"""A trainer that keeps a buffer of what its model did, and learns from it: `rollout_run.py FOLDER KILL_AT [STEPS]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import Net, rows
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback, TrainingArguments


class Rollouts:
    """The last losses, as an agent's buffer would keep its last episodes."""

    def __init__(self, size: int = 8) -> None:
        self._size, self._values = size, torch.empty(0)

    def add(self, values: Tensor) -> None:
        self._values = torch.cat([self._values, values])[-self._size :]

    def mean(self) -> Tensor:
        return self._values.mean() if len(self._values) else torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = state["values"].clone()


class RolloutTrainer(Trainer):
    """Weighs each loss by how much it exceeds those in the buffer, which is saved with the run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollouts, self.began = Rollouts(), False
        self.accelerator.register_for_checkpointing(self.rollouts)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        if not self.began:
            self.began = True
            print("begins with", self.rollouts.state_dict()["values"].tolist(), flush=True)
        loss = outputs["loss"] * (1 + torch.sigmoid(outputs["loss"].detach() - self.rollouts.mean()))
        self.rollouts.add(outputs["loss"].detach().reshape(1))
        return (loss, outputs) if return_outputs else loss


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step and state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kill_at: int, steps: int = 9) -> None:
    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, save_steps=3, save_in_background=False,
        report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=3, log_level="info",
    )  # fmt: skip
    trainer = RolloutTrainer(Net(), args, train_dataset=rows(24), callbacks=[Kill(kill_at)])
    trainer.train(resume_from_checkpoint="auto")
    print("kept", trainer.rollouts.state_dict()["values"].tolist(), flush=True)
    state = {**trainer.model.state_dict(), "rollouts": trainer.rollouts.state_dict()["values"]}
    if trainer.is_world_process_zero():
        torch.save(state, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
