"""Print each log as a dict."""

from __future__ import annotations

from typing import Any

from windlass.callbacks.rows import Logs, Metrics
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.output import say


def readable(logs: Metrics) -> dict[str, Any]:
    """Return the logs with floats to four digits and without the FLOP counter."""
    return {
        name: f"{value:.4g}" if isinstance(value, float) else value
        for name, value in logs.items()
        if name != "total_flos"
    }


class PrinterCallback(TrainerCallback):
    """Prints each log as a dict on standard output, on the main process of each node.

    Replaces the progress bar if `disable_tqdm` is set.
    """

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            say(readable(logs))
