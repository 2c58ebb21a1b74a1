"""The names of `windlass.utils`, with `windlass.utils.logging.set_verbosity(level)` and others, loaded on first use.

A name of the old library that Windlass does not have raises an error with the reason.
"""

from __future__ import annotations

from windlass.config.support_names import WHY
from windlass.core import logs as logging
from windlass.core.lazy import loader_of, reverse
from windlass.utils.homes import HOMES

_NAMES = reverse(HOMES)
__getattr__ = loader_of("windlass.utils", _NAMES, WHY)
__all__ = ["logging", *sorted(_NAMES)]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
