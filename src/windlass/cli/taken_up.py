"""Where a run was taken up: what this process has done is what came after."""

from __future__ import annotations

from typing import Any

from windlass.core.events import TrainerCallback, TrainerControl, TrainerState


class TakenUp(TrainerCallback):
    """Notes the `step` at which training began in this process: 0, or that of the checkpoint it was resumed from."""

    step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step
