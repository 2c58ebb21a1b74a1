"""What a launcher exports for plugins that read the environment themselves."""

from __future__ import annotations

import os
from typing import Any

from windlass.config.parallel.keys import Settings
from windlass.config.parallel.sources import OWN_VARIABLE, from_environment
from windlass.config.parallel.table import KEYS
from windlass.core.errors import ConfigError, Problem


def launched(family: str) -> dict[str, Any]:
    """What the environment of this process sets of a family of settings, as its launcher exports it: {word: value}.

    Settings that are not built are included: the object that has them refuses them on use. Raises ConfigError if a
    variable cannot be read.
    """
    found: dict[str, Any] = {}
    for key in (key for key in KEYS.values() if key.family == family):
        for variable in key.variables:
            if (raw := os.environ.get(variable, "")) not in ("", "None"):
                try:
                    found[key.words[0]] = key.read(raw)
                except ValueError as error:
                    raise ConfigError(Problem(variable, raw, str(error))) from None
    own = from_environment(os.environ) if OWN_VARIABLE in os.environ else Settings()
    return found | {KEYS[name].words[0]: own[name].value for name in own if KEYS[name].family == family}
