"""A script that any launcher can start: an accelerator says where it found itself, and one update is made."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator

accelerator = Accelerator()
layer = nn.Linear(2, 1)
model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(3, 2, device=accelerator.device)).sum())
optimizer.step()
# The oldest of the launchers puts `--local-rank` before the arguments.
text = f"{accelerator.num_processes} {accelerator.mixed_precision} {accelerator.device.type}"
Path(sys.argv[-1], str(accelerator.process_index)).write_text(text)
accelerator.end_training()
