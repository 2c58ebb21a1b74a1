"""The plainest subscriber: one printed dict per log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.output import say


def readable(logs: Mapping[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """The logs as a person wants them: floats to four digits, long strings cut, without the FLOP counter.

    Args:
        max_str_len: a longer string is cut to this many characters, and its full length is said; None never
            cuts.
    """
    return {name: _short(value, max_str_len) for name, value in logs.items() if name != "total_flos"}


def _short(value: Any, max_str_len: int | None) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
        return f"{value[:max_str_len]}... ({len(value)} characters)"
    return value


class PrinterCallback(TrainerCallback):
    """Prints each log as a dict on standard output, on the main process of each node.

    Stands in for the progress bar where `disable_tqdm` turns the bar off.
    """

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            say(readable(logs))
