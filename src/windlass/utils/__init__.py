"""Names that scripts reach as `windlass.utils`, and `windlass.utils.logging.set_verbosity(level)` and the like.

They are loaded when they are first asked for. A name that scripts know and Windlass has not says why.
"""

from __future__ import annotations

import importlib
from typing import Any

from windlass.core import logs as logging  # noqa: F401 (reached as `windlass.utils.logging`)
from windlass.utils.table import HOMES, REFUSED

_NAMES = {name: module for module, names in HOMES.items() for name in names}
_REASONS = {name: reason for reason, names in REFUSED.items() for name in names}
__all__ = sorted([*_NAMES, "logging"])


def __getattr__(name: str) -> Any:
    if name in _REASONS:
        # Not an AttributeError: `from windlass.utils import name` would swallow its words.
        raise ImportError(f"windlass.utils has no {name}: {_REASONS[name]}")
    if name not in _NAMES:
        raise AttributeError(f"module 'windlass.utils' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
