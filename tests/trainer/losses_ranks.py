"""Run on ranks: steps past the wrapper that reduces gradients, or past the accelerator, and auxiliary terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.test_losses import trainer_for
from tests.trainer.test_micro_steps import OwnGradients
from torch import Tensor, nn

from windlass import LossTerms, Trainer
from windlass.core.errors import ModelError


class PastTheWrapper(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = self.model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def main(folder: Path) -> list[str]:
    """What is said of each step."""
    return [_said(folder / kind.__name__, kind) for kind in (PastTheWrapper, OwnGradients)]


def _said(folder: Path, kind: type[Trainer]) -> str:
    said = ""
    trainer = trainer_for(folder, kind)
    try:
        trainer.train()
    except ModelError as error:
        said = str(error)
    trainer.accelerator.wait_for_everyone()  # the sums of the group that was fetched ahead are still under way
    trainer.end()
    return said


class WithParts(Trainer):
    """Mean errors, and the size of the weights: half of it on each of two ranks, or all of it on one."""

    everywhere = True

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        logits, size = model(x=inputs["x"])["logits"], self.model.layer.weight.square().sum()
        error = nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")
        rank, step = self.accelerator.process_index, self.state.global_step
        parts: dict[str, Tensor] = {}
        if self.everywhere:
            parts = {"size": size} if step == 0 else {"other": size}
        elif (rank == 0) == (step == 0):
            parts = {"size": 2 * size} if step == 0 else {"other": 2 * size}
        return LossTerms(error, float(len(logits)), parts)


class PartsOnOneRank(WithParts):
    everywhere = False


def parts_on_one_rank(folder: Path) -> list[tuple[dict[str, float], list[float]]]:
    """The report of two updates and the weights after them."""
    found = []
    for kind in (WithParts, PartsOnOneRank):
        trainer = trainer_for(folder / kind.__name__, kind, max_steps=2, logging_steps=2)
        trainer.train()
        logs = {name: trainer.state.log_history[0].get(name, -1.0) for name in ("loss", "size", "other")}
        found.append((logs, trainer.model.layer.weight.flatten().tolist()))
        trainer.end()
    return found
