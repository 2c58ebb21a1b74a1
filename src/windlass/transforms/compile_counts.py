"""How often a run compiled, and how often again: for inputs of another shape or dtype, or in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class CompileCounts:
    """Counts the graphs that `torch.compile` captures within `counting`.

    Attributes:
        graphs: all of them.
        recompilations: those of code that was compiled before, for other inputs.
    """

    def __init__(self) -> None:
        self.graphs, self.recompilations = 0, 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the body."""
        from torch._dynamo.callback import callback_handler  # takes a second

        callback_handler.register_start_callback(self._note)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._note)

    def _note(self, event: Any) -> None:
        if event.callback_trigger.name == "DYNAMO":
            self.graphs += 1
            # "frame/attempt", such as "3/0" for the first of a piece of code.
            self.recompilations += not str(event.compile_id).endswith("/0")
