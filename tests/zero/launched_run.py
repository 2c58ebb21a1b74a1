"""A script that knows nothing of DeepSpeed; its launcher sets it. Writes what it came to as JSON. Args: folder, and
a configuration of DeepSpeed if the launcher sets none, "language" to train a language model in bf16, or "loop" to do so
in a loop of the script's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import llama, text_rows
from tests.zero.runs import RANK, language_trainer, told, trainer

from windlass import Accelerator


def looped() -> dict[str, Any]:
    """A loop as the guides print it, and what it came to."""
    accelerator = Accelerator()
    model: Any = llama(tied=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids: Any = torch.stack([row["input_ids"] for row in text_rows(40)])
    loader: Any = torch.utils.data.DataLoader(ids, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 4:
            break
    return {"loss": losses, "deepspeed": accelerator.state.deepspeed_plugin is not None}


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # of DeepSpeed's launcher
    folder, others = Path(words[0]), words[1:]
    if others == ["loop"]:
        found = looped()
    else:
        own = {"deepspeed": others[0]} if others else {}
        language = others == ["language"]
        made = language_trainer(folder, -1, steps=4) if language else trainer(folder, stage=-1, **own)
        made.train()
        found = {**told(made), "deepspeed": made.is_deepspeed_enabled}
    if RANK == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
