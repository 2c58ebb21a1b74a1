"""What the processes of one layout compute, as plain data, and the files that they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.proofs.small_config import AxisLayout

UPDATES, ROWS, ACCUMULATION, MAX_NORM = 4, 2, 3, 0.3
TOLERANCE = 1e-10  # the largest difference, as a share of the values, that is rounding
# Figures that are compared after the gradients of an update, if it has them: what they are -> how they are logged.
FIGURES = {
    "norm": "grad_norm",
    "entropy": "entropy",
    "token accuracy": "mean_token_accuracy",
    "targets": "num_tokens",
}
VALUES, REPORT, OUTPUT = "values{}.safetensors", "report{}.json", "output{}.txt"


@dataclass(frozen=True, slots=True)
class SmallTraining:
    """One training.

    Attributes:
        config: of the small model.
        layout: the sizes of the axes in use.
        batches: micro-batches of `ROWS` samples in an update over all ranks: the same ones in every layout that is
            compared, for a loss that is not a sum over tokens depends on them.
        facts: the arguments of the recipe on which it depends what is computed; see `arguments_that_matter`.
        joined: the micro-batches that ranks compute at once are one on a single process. The balancing loss of experts
            that are divided is that of all of them; others have the mean of those of ranks.
    """

    config: dict[str, Any]
    layout: AxisLayout
    batches: int
    facts: dict[str, Any]
    joined: bool = False

    @property
    def micro(self) -> int:
        """Samples of a micro-batch of each rank with samples of its own."""
        return ROWS * self.batches // (ACCUMULATION * self.layout.data_ranks) if self.joined else ROWS

    @property
    def accumulation(self) -> int:
        """Micro-batches of an update."""
        return ACCUMULATION if self.joined else self.batches // self.layout.data_ranks
