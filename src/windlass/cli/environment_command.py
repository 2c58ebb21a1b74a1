"""`windlass env`: versions, devices and launch settings, for a bug report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from windlass import __version__
from windlass.callbacks.run_record import environment
from windlass.cli.command_line import CommandParser, answer
from windlass.cli.launching.launch import launch_settings
from windlass.core.errors import ConfigError
from windlass.core.optional import DISTRIBUTION, require, version_of
from windlass.recipes.from_files import find_file


def environment_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    require("torch", "train")
    facts: dict[str, object] = {name: value for name, value in environment().items() if name != "command"}
    facts["windlass"] = f"{__version__} ({Path(__file__).parents[1]})"
    facts |= _other_distribution() | _launch_facts()
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
    return answer(options, {name.strip(): value for name, value in facts.items()}, lines)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="windlass env", description="Print versions, devices and launch settings.")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _other_distribution() -> dict[str, object]:
    """Return what to do about a distribution of another name whose package is `windlass` too."""
    if (found := version_of("windlass")) is None:
        return {}
    fix = f"remove both, then install again: pip uninstall windlass {DISTRIBUTION}"
    return {"conflict": f"the distribution windlass {found} writes into the same package: {fix}"}


def _launch_facts() -> dict[str, object]:
    """Return the launch file, and each setting of it and of the environment with its source."""
    path, _ = find_file(os.environ)
    facts: dict[str, object] = {"launch file": path or "none; `windlass config` writes one"}
    try:
        settings = launch_settings(argparse.Namespace(), os.environ)
    except ConfigError as error:
        return facts | {"launch settings": error}
    facts |= {
        f"  {key}": f"{setting.value!r} ({setting.origin})" for key, setting in sorted(settings.items())
    }
    return facts | ({"  problems": "; ".join(map(str, settings.problems))} if settings.problems else {})
