"""Print each log as a dict."""

from __future__ import annotations

from typing import Any

from windlass.callbacks.rows import Logs, Metrics
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.output import say


def readable(logs: Metrics, max_str_len: int | None = None) -> dict[str, Any]:
    """Return the logs with floats to four digits and without the FLOP counter.

    Args:
        max_str_len: longer strings are cut to this many characters, followed by their length; None for no limit.
    """

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.4g}"
        if isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
            return f"{value[:max_str_len]}... ({len(value)} characters)"
        return value

    return {name: short(value) for name, value in logs.items() if name != "total_flos"}


class PrinterCallback(TrainerCallback):
    """Prints each log as a dict on standard output, on the main process of each node.

    Replaces the progress bar if `disable_tqdm` is set.
    """

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            say(readable(logs))
