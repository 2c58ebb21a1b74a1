"""Run on ranks: a loss that calls `self.model`, past the wrapper that reduces gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.test_losses import trainer_for

from windlass import Trainer
from windlass.core.errors import ModelError


class PastTheWrapper(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = self.model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def main(folder: Path) -> str:
    said = ""
    trainer = trainer_for(folder / "out", PastTheWrapper)
    try:
        trainer.train()
    except ModelError as error:
        said = str(error)
    trainer.accelerator.wait_for_everyone()  # the sums of the group that was fetched ahead are still under way
    trainer.end()
    return said
