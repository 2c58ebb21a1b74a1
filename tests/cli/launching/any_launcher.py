"""A script that any launcher can start: an accelerator says where it found itself, and meets the others."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from windlass.accelerator.accelerator import Accelerator

accelerator = Accelerator()
rank = torch.tensor([accelerator.process_index], device=accelerator.device)
assert accelerator.gather(rank).tolist() == list(range(accelerator.num_processes))
# The oldest of the launchers puts `--local-rank` before the arguments.
text = f"{accelerator.num_processes} {accelerator.mixed_precision} {accelerator.device.type}"
Path(sys.argv[-1], str(accelerator.process_index)).write_text(text)
accelerator.end_training()
