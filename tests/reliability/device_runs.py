"""Small runs of each kind that has kernels of its own on an accelerator. Started as

    python -m tests.reliability.device_runs NAME FOLDER [--kill STEP] [--cpu]

Trains NAME into FOLDER, from its newest checkpoint if there is one; `--kill` ends the process by SIGKILL within that
step. At the end, `told.json` has the losses, a hash of what was trained, and the device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from tests.finetuning import preferences, small

from windlass import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, Trainer, TrainerCallback, TrainingArguments
from windlass.checkpoint.store import Store

STEPS, EVERY = 8, 3
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}  # kernels of few bits want 64
# What each run changes of the arguments. A name with `+` after it is started by the launcher, as one rank of a group.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "fp16": {"fp16": True},
    "compiled": {"bf16": True, "torch_compile": True},
    "recomputed": {"bf16": True, "gradient_checkpointing": True},
    "float8": {"fp8": True},
    "adamw_bnb_8bit": {"optim": "adamw_bnb_8bit"},
    "paged_adamw_8bit": {"optim": "paged_adamw_8bit"},
    "adamw_torch_4bit": {"optim": "adamw_torch_4bit"},
    "adamw_torch_8bit": {"optim": "adamw_torch_8bit"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "lomo": {"optim": "lomo"},
    "loader with workers": {"bf16": True, "dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "evaluated": {"bf16": True, "eval_strategy": "steps", "eval_steps": 2},
    "ddp+": {"bf16": True},
    "fsdp+": {"bf16": True, "fsdp": "full_shard"},
    "fsdp, fp16+": {"fp16": True, "fsdp": "full_shard"},
    "fsdp, compiled+": {"bf16": True, "fsdp": "full_shard", "torch_compile": True},
    "fsdp, on the host+": {"bf16": True, "fsdp": "full_shard offload"},
    "fsdp, fp16, on the host+": {"fp16": True, "fsdp": "full_shard offload"},
    "sft, packed": {"bf16": True, "packing": True},
    "sft, packed, compiled": {"bf16": True, "packing": True, "torch_compile": True},
    "sft, Liger's kernels": {"bf16": True, "use_liger_kernel": True},
    "sft, padding-free": {"bf16": True, "padding_free": True, "max_length": None},
    "sft, activations on the host": {"bf16": True, "activation_offloading": True},
    "sft, answers": {
        "bf16": True, "eval_strategy": "steps", "eval_steps": 4, "predict_with_generate": True,
        "eval_metrics": ["exact_match"],
    },
    "lora": {"bf16": True, "packing": True},
    "qlora": {"bf16": True, "packing": True},
    "qlora, sharded+": {"bf16": True, "packing": True, "fsdp": "full_shard"},
    "dpo": {"bf16": True},
}  # fmt: skip


class Killed(TrainerCallback):
    """SIGKILL at the end of a step; those before it are slow, so that a save in the background ends within them."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.5)
        if state.global_step == self._step:
            assert Store(Path(args.output_dir)).newest_verified()[0] is not None
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(name: str, folder: Path, cpu: bool) -> Trainer:
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": STEPS, "save_strategy": "steps", "save_steps": EVERY,
        "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": "none",
        "disable_tqdm": True, "seed": 1, "full_determinism": True, "use_cpu": cpu, **ARGUMENTS[name],
    }  # fmt: skip
    if name == "dpo":
        rows = small.table(preferences.pairs(40))
        return DPOTrainer(
            small.model(**SIZES),
            args=DPOConfig(**options),
            train_dataset=rows,
            processing_class=small.tokenizer(),
        )
    if name.startswith(("sft", "lora", "qlora")):
        return _sft(name, folder, SFTConfig(**{"max_length": 64, "gradient_checkpointing": False, **options}))
    counted = [[1 + (start + place) % 35 for place in range(24)] for start in range(40)]
    rows = [{"input_ids": ids, "labels": ids} for ids in counted]
    return Trainer(
        small.model(**SIZES), TrainingArguments(**options), train_dataset=rows, eval_dataset=rows[:8]
    )


def _sft(name: str, folder: Path, args: SFTConfig) -> Trainer:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = small.model(**SIZES)
    if name.startswith("qlora"):
        path = small.saved(folder / "base", **SIZES)
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=bits, dtype=torch.bfloat16)
    adapter = LoraConfig(r=4, target_modules="all-linear") if "lora" in name else None
    return SFTTrainer(
        model, args, train_dataset=small.table(small.prompts(40)), eval_dataset=small.table(small.prompts(4)),
        processing_class=small.tokenizer(), peft_config=adapter,
    )  # fmt: skip


def weights(run: Path) -> str:
    """A hash of every file of weights of the newest checkpoint."""
    newest, _ = Store(run).newest_verified()
    assert newest is not None
    files = sorted(newest.rglob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    made = trainer(given.name, given.folder, given.cpu)
    if given.kill:
        made.add_callback(Killed(given.kill))
    made.train(resume_from_checkpoint=Store(given.folder / "run").newest_verified()[0])
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    told = {"losses": losses, "weights": weights(given.folder / "run"), "device": str(made.args.device)}
    (given.folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
