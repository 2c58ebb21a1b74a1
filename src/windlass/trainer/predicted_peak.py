"""The peak of a run's memory beside what `windlass plan` predicted for it, if it did."""

from __future__ import annotations

import datetime
from typing import Any

from windlass.metrics.predictions import add_measured, are_any, find_prediction, key_of
from windlass.trainer.run_context import RunContext

# The optimizer has its state after the first update, and the peak is that of a later one.
_UPDATES = 2


class PredictedPeak:
    """Compares the memory of rank 0 with a prediction.

    On the CPU the memory of the process is measured. It is not that of the rank if the model was divided among ranks:
    each process builds all of it first.

    Attributes:
        memory: what is measured with.
    """

    def __init__(self, context: RunContext) -> None:
        device, strategy = context.session.device, context.built.executor.strategy
        self._context, self.memory = context, context.session.memory
        self._looks = context.all_ranks.rank == 0 and not (device.type == "cpu" and strategy.sharded)
        self._found: dict[str, Any] | None = None

    def begin(self, batch: Any) -> None:
        """Look for the prediction of a run that begins with this micro-batch."""
        if not self._looks or not are_any():
            return
        context, on_device = self._context, self._context.session.device.type != "cpu"
        mesh, averages = context.all_ranks.mesh, context.events.average() is not None
        self._found = find_prediction(
            key_of(context.files.model, context.plan, mesh, batch, averages=averages, on_device=on_device)
        )

    def measured(self, updates: int) -> dict[str, int] | None:
        """Predicted and measured bytes of a run of so many updates, which the record of predictions gets too. None
        without a prediction, or if the peak is not known.
        """
        if self._found is None or updates < _UPDATES:
            return None
        growth = self.memory.growth()
        if growth is None:
            return None
        add_measured(self._found["key"], growth, datetime.date.today().isoformat())
        return {"predicted": self._found["predicted"], "measured": growth}
