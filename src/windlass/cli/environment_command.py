"""`windlass env`: versions, devices and launch settings, for a bug report."""

from __future__ import annotations

import argparse
import os

from windlass.callbacks.report import environment
from windlass.config.launch_file import find_file
from windlass.config.parallel import from_environment, from_file, merge
from windlass.core.errors import ConfigError
from windlass.core.optional import require
from windlass.core.output import say


def environment_command(words: list[str]) -> int:
    """Print versions, devices, and the settings of a launch; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="windlass env", description="Print versions, devices and launch settings."
    )
    parser.parse_args(words)
    require("torch", "train")
    facts: dict[str, object] = {name: value for name, value in environment().items() if name != "command"}
    facts |= _launch_facts()
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name:<{width}}  {value}")
    return 0


def _launch_facts() -> dict[str, object]:
    """Return the launch file, and each setting of it and of the environment with its source."""
    path, _ = find_file(os.environ)
    facts: dict[str, object] = {"launch file": path or "none; `windlass config` writes one"}
    try:
        settings = merge(from_environment(os.environ), *([from_file(path)] if path else []))
    except ConfigError as error:
        return facts | {"launch settings": error}
    facts |= {
        f"  {key}": f"{setting.value!r} ({setting.origin})" for key, setting in sorted(settings.items())
    }
    return facts | ({"  problems": "; ".join(map(str, settings.problems))} if settings.problems else {})
