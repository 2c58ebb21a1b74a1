"""How a section declares one argument."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    """A dataclass field with its help text; a list default is copied for each instance, a secret never printed."""
    info = {"help": help, **metadata}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=info)
    return dataclasses.field(default=default, metadata=info, repr=not secret)
