"""Torch's elastic launcher, where Windlass speaks for it."""

from __future__ import annotations

import logging


def quiet_elastic() -> None:
    """Silence the loggers of torch's launcher: it tells a failure several times over, and it is told once, in a report.

    Each of its modules sets the level of its own logger when it is imported, so this comes after the imports.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
