"""`windlass env`: what a report of a problem needs to tell."""

from __future__ import annotations

import os

from windlass.callbacks.report import environment
from windlass.config.launch_file import find_file
from windlass.config.parallel import from_environment, from_file, merge
from windlass.core.errors import ConfigError
from windlass.core.optional import require
from windlass.core.output import say


def environment_command() -> int:
    """Print versions and devices, and what a launch would find configured."""
    require("torch", "train")
    facts: dict[str, object] = {name: value for name, value in environment().items() if name != "command"}
    facts |= _launch_facts()
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name:<{width}}  {value}")
    return 0


def _launch_facts() -> dict[str, object]:
    """The launch file, and each setting that it or a variable makes, with where it was made."""
    path, _ = find_file(os.environ)
    facts: dict[str, object] = {"launch file": path or "none; `windlass config` writes one"}
    try:
        said = [from_environment(os.environ), *([from_file(path)] if path else [])]
        settings = merge(*said)
    except ConfigError as error:
        return facts | {"launch settings": error}
    facts |= {
        f"  {key}": f"{setting.value!r} ({setting.origin})" for key, setting in sorted(settings.items())
    }
    return facts | ({"  problems": "; ".join(map(str, settings.problems))} if settings.problems else {})
