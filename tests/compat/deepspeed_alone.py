"""Run by `windlass launch`: a loop of DeepSpeed alone, which writes its own checkpoints.

Args: folder, then words STAGE or STAGEb (bf16). Writes `stageSTAGE/global_step3` with its companions, and the weights
that the model had as `stageSTAGE.safetensors`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.zero.runs import RANK
from torch import Tensor, nn

if __name__ == "__main__":
    import deepspeed  # tests that use the model skip without it


class Tied(nn.Module):
    """Odd sizes, two groups of the optimizer, tied weights, a frozen parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.inner = nn.Embedding(11, 5), nn.Linear(5, 7)
        self.norm, self.back = nn.LayerNorm(7), nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.inner.bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.randn(3))

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps += 1
        hidden = self.back(self.norm(torch.tanh(self.inner(self.embed(ids)))))
        logits = self.head(hidden * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def train(folder: Path, word: str) -> None:
    stage, half = int(word.rstrip("b")), word.endswith("b")
    model = Tied()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.02)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(3):
        engine.backward(engine(torch.randint(11, (4, 6), generator=generator)))
        engine.step()
    engine.save_checkpoint(str(folder / f"stage{word}"), client_state={"of": "the script"})
    gathered = list(model.parameters()) if stage == 3 else []
    with deepspeed.zero.GatheredParameters(gathered):
        if RANK == 0:
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            save_file(weights, folder / f"stage{word}.safetensors")


def main() -> None:
    deepspeed.init_distributed("gloo")
    for word in sys.argv[2:]:
        train(Path(sys.argv[1]), word)


if __name__ == "__main__":
    main()
