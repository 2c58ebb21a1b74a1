"""Settings out of the launcher's flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.config.parallel.settings import Settings
from windlass.config.parallel.table import FLAGS


def from_flags(options: Mapping[str, Any]) -> Settings:
    """What the command line said.

    Args:
        options: flag without dashes -> what was given; only those that were. None and False count as not given.
    """
    settings = Settings()
    for word, raw in options.items():
        if word in FLAGS and raw is not None and raw is not False:
            settings.say(FLAGS[word], raw, f"--{word}", "flag", weak=False)
    return settings
