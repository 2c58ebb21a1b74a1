"""Run on ranks: each rank's own loader is of another length; resumed from each of its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.trainer.test_losses import samples, trainer_for
from torch.utils.data import DataLoader

from windlass import Trainer

RANK = int(os.environ.get("RANK", "0"))
SAMPLES = (11, 5)


class OwnLoader(Trainer):
    """The second rank runs out in the second of three updates."""

    seen: list[int]

    def get_train_dataloader(self) -> Any:
        rows = [{**row, "index": index} for index, row in enumerate(samples(SAMPLES[RANK]))]
        return DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        index = inputs.pop("index")
        self.seen = [*getattr(self, "seen", []), *index.tolist()]
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def outcome(folder: Path, resume: str | None = None) -> dict[str, Any]:
    trainer = trainer_for(
        folder,
        OwnLoader,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        ddp_timeout=30,
        save_strategy="steps",
        save_steps=1,
        remove_unused_columns=False,
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = [p.detach().flatten().tolist() for p in trainer.model.parameters()]
    logs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    epochs = [row["epoch"] for row in trainer.state.log_history if "loss" in row]
    steps = trainer.state.global_step, trainer.state.max_steps
    return {"weights": weights, "logs": logs, "epochs": epochs, "steps": steps, "seen": len(trainer.seen)}


def main(folder: Path) -> dict[str, Any]:
    whole = outcome(folder / "whole")
    resumed = [
        outcome(folder / f"resumed-{step}", str(folder / "whole" / f"checkpoint-{step}"))
        for step in range(1, 6)
    ]
    return {"whole": whole, "resumed": resumed}
