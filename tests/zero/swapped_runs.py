"""Run on ranks: trainings whose tensors are in files between steps, in memory, or without DeepSpeed.

Args: folder, then words `name:kind:steps`, `name:kind:steps:resume` or `name:kind:steps:killed`; kinds: "alone",
"memory", or which tensors are in files: "optimizer", "params", "both". With "-built" a language model in bf16, which is
divided while it is built.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, rows, text_rows
from tests.zero.runs import WORLD, config
from torch import nn

from windlass import Trainer, TrainerCallback


class Wide(nn.Module):
    """Large enough for files: DeepSpeed keeps tensors of less than 1 MB on a rank in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.frozen, self.head = nn.Linear(4, 1024), nn.Linear(1024, 512), nn.Linear(512, 3)
        self.middle = nn.Linear(1024, 1024)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.frozen(torch.tanh(self.middle(torch.tanh(self.inner(x)))))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def language_model() -> Any:
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, num_key_value_heads=2, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


class Killed(TrainerCallback):
    """Ends the process before step 5, once the checkpoint of step 3 is there."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def offloading(kind: str, files: Path) -> dict[str, Any]:
    if kind == "alone":
        return {}
    disk = {"device": "nvme", "nvme_path": str(files)}
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    if kind in ("optimizer", "both"):
        zero["offload_optimizer"] = disk
    if kind in ("params", "both"):
        # One buffer, for a model with several layers in files.
        zero["offload_param"] = {**disk, "buffer_size": 1 << 20, "buffer_count": 1, "max_in_cpu": 0}
    return config(3, zero_optimization=zero, aio={"block_size": 1 << 20})


def trainer(folder: Path, kind: str, steps: int, **changes: Any) -> Trainer:
    kind, _, built = kind.partition("-")
    args = arguments(
        folder, per_device_train_batch_size=3, gradient_accumulation_steps=4 // WORLD, max_steps=steps,
        save_strategy="steps", save_steps=3, lr_scheduler_type="constant",
        weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, learning_rate=0.001,
        bf16=bool(built), **changes, **offloading(kind, folder / "files"),
    )  # fmt: skip
    if built:
        torch.manual_seed(3)
        return Trainer(language_model(), args, train_dataset=text_rows(80), eval_dataset=text_rows(9))
    return Trainer(Wide(), args, train_dataset=rows(80), eval_dataset=rows(9))


def main(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
    for word in words:
        name, kind, steps, *how = word.split(":")
        made = trainer(folder / name, kind, int(steps), save_in_background=how != ["killed"])
        if how == ["killed"]:
            made.add_callback(Killed())
        made.train(resume_from_checkpoint=how == ["resume"])
        files = sorted(path.name for path in (folder / name / "files").rglob("*.tensor.swp"))
        evaluation = made.evaluate()["eval_loss"]
        made.save_model()
        logged = [row for row in made.state.log_history if "loss" in row]
        found[name] = {key: [row[key] for row in logged] for key in ("loss", "grad_norm")}
        found[name] |= {"evaluation": evaluation, "files": files}
    return found
