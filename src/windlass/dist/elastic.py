"""Silence torch's elastic launcher, whose failures Windlass reports itself."""

from __future__ import annotations

import logging


def quiet_elastic() -> None:
    """Silence the loggers of torch's launcher: it logs a failure several times, and Windlass reports it once.

    Each of its modules sets the level of its own logger when it is imported, so this comes after the imports.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
