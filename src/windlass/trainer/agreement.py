"""What ranks tell each other while they train."""

from __future__ import annotations

from typing import NamedTuple


class Signals(NamedTuple):
    """Numbers that every rank sends with each group of data; their sums reach all ranks at the same update.

    Attributes:
        stop: wishes to end the run with this update.
        leave: processes that a scheduler told to leave.
        save_due: the main process's clock asks for an ephemeral checkpoint, or for one in place of a failed one.
        written, settled, failed: the counters of the save under way (`checkpoint.background.Counters`).
    """

    stop: float = 0.0
    leave: float = 0.0
    save_due: float = 0.0
    written: float = 0.0
    settled: float = 0.0
    failed: float = 0.0
