"""A logger that logs on the main process, on all processes, or on one after the other."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from windlass.compat.state import PartialState
from windlass.core.errors import ModelError
from windlass.core.world import world_from_environment


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger with two more keywords in each call: `main_process_only` (True by default) and `in_order`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return `msg` with the rank before it, and `kwargs` of the call with the place of the caller."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # show the line of the caller
        return f"[RANK {world_from_environment().rank}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: such as `logging.INFO`.
            msg: with places for `args`, as of `logging`.
            main_process_only: log on the main process only.
            in_order: log on all processes in order of rank. Raises ModelError if this process has not
                joined them. Collective.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # Before any barrier: ranks have equal levels, so none of them waits for one that logs nothing.
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if not in_order:
            # Libraries log before there is a state, which would join the processes with settings of its own.
            if world_from_environment().is_main or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        if not PartialState._shared_state:
            raise ModelError(
                "in_order needs the other processes; create a PartialState() or an Accelerator() first"
            )
        state = PartialState()
        for turn in range(state.num_processes):
            if turn == state.process_index:
                self.logger.log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    @functools.cache  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time it is called with these arguments."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger `name`, for several processes.

    Args:
        log_level: "DEBUG", "INFO", ... for it and the root logger; by default the environment variable
            ACCELERATE_LOG_LEVEL, if it is set.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
