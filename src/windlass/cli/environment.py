"""`windlass env`: what a report of a problem needs to tell."""

from __future__ import annotations

from windlass.callbacks.report import environment
from windlass.core.optional import require


def environment_command() -> int:
    """Print versions and devices."""
    require("torch", "train")
    facts = {name: value for name, value in environment().items() if name != "command"}
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0
