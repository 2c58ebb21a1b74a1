"""Rows of preferences and short runs on them, for the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.finetuning import small

from windlass.finetuning.dpo_config import DPOConfig

SHORT: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 3,
    "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 4, "learning_rate": 1e-2,
    "disable_tqdm": True, "max_length": 64, "seed": 1,
}  # fmt: skip


def pairs(count: int = 17) -> list[dict[str, Any]]:
    """Rows with a prompt, a chosen and a rejected answer."""
    rows = small.prompts(count)
    others = [row["completion"] + " 7" for row in rows[1:] + rows[:1]]
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other}
        for row, other in zip(rows, others, strict=True)
    ]


def talks(count: int = 17, *, explicit: bool = True) -> list[dict[str, Any]]:
    """The same as conversations, with the prompt as a column or as the first message of both answers."""
    found = []
    for row in pairs(count):
        prompt = [{"role": "user", "content": row["prompt"]}]
        chosen, rejected = (
            [{"role": "assistant", "content": row[name].strip()}] for name in ("chosen", "rejected")
        )
        if explicit:
            found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        else:
            found.append({"chosen": prompt + chosen, "rejected": prompt + rejected})
    return found


def settings(folder: Path | str, kind: Any = DPOConfig, **changes: Any) -> Any:
    """Short runs in float32 on the CPU, without recomputation."""
    return kind(str(folder), **{**SHORT, **changes})


def moved(model: Any, seed: int = 5) -> Any:
    """`model` with other weights, so that it differs from its reference."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter)
    return model
