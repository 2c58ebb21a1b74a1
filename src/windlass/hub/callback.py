"""`push_to_hub`: publish each save of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import TrainerCallback
from windlass.core.events import TrainerControl, TrainerState
from windlass.hub.publisher import Publisher


class HubCallback(TrainerCallback):
    """Uploads what is saved, and waits for the uploads at the end. The repository is open before training begins.

    Args:
        publisher: used on the main process; other processes do nothing.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.publisher.saved(Path(args.output_path) / f"checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.publisher.finish()
