"""Names that scripts reach as `windlass.utils`, and `windlass.utils.logging.set_verbosity(level)` and the like.

They are loaded when they are first asked for. A name that scripts know and Windlass has not says why.
"""

from __future__ import annotations

from windlass.core import logs as logging
from windlass.core.lazy import loader_of, reverse
from windlass.utils.homes import HOMES, REFUSED

_NAMES = reverse(HOMES)
__getattr__ = loader_of("windlass.utils", _NAMES, reverse(REFUSED))
__all__ = ["logging", *sorted(_NAMES)]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
