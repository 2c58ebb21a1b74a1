"""Run on ranks: a loop with a trained model and two references, whose parameters are in memory or in files.

Args: folder, and "cpu" or "nvme".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass import Accelerator
from windlass.utils import DeepSpeedPlugin


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    lines = nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1)
    return nn.Sequential(lines[0], nn.Tanh(), lines[1], nn.Tanh(), lines[2])


def main(folder: Path, device: str) -> list[float]:
    section: dict[str, Any] = {"device": device}
    if device == "nvme":
        section |= {"nvme_path": str(folder / "files"), "buffer_size": 1 << 20, "max_in_cpu": 0}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": section}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    trained, references = model(0), [model(seed).requires_grad_(False) for seed in (1, 2)]
    optimizer: Any = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    torch.manual_seed(5)
    loader: Any = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=4)
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    references = [accelerator.prepare(reference) for reference in references]
    losses = []
    for x in loader:
        with torch.no_grad():
            target = sum(reference(x) for reference in references)
        loss = ((trained(x) - target) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
