"""Find and write launch files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.cli.launching.from_files import parse_file, without_unknown
from windlass.config.parallel import rows_training
from windlass.config.parallel.settings import Setting, Settings, merge
from windlass.config.parallel.table import KEYS
from windlass.core.errors import ConfigError
from windlass.core.locations import cache_folder, home_folder
from windlass.core.whole_file import write_whole

FILE_NAME = "default_config.yaml"


def default_file(environ: Mapping[str, str]) -> Path:
    """Where `windlass config` writes: in `$WINDLASS_HOME`, else in `~/.cache/windlass`."""
    return home_folder(environ) / FILE_NAME


def find_file(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Find the launch file to read if none is named, and a note to log about it.

    Without one of Windlass, that of `accelerate config` is used.
    """
    own = default_file(environ)
    if own.is_file():
        return own, ""
    home = environ.get("HF_HOME") or cache_folder(environ) / "huggingface"
    for name in (FILE_NAME, "default_config.json"):
        other = Path(home).expanduser() / "accelerate" / name
        if other.is_file():
            return (
                other,
                f"read {other}, which `accelerate config` wrote; `windlass config` writes one for Windlass",
            )
    return None, ""


def basic_settings(precision: str, devices: int, origin: str) -> Settings:
    """Settings for one process per accelerator of this machine, or one on the CPU. Raises ConfigError for an unknown
    precision, with `origin` as the place where it was set.
    """
    settings = Settings()
    settings.record(rows_training.PRECISION, precision, origin, "flag", implicit=False)
    if settings.problems:
        raise ConfigError(settings.problems)
    said = {"launch.machines": 1, "launch.processes": max(devices, 1), "cpu": devices == 0}
    return merge(settings, Settings({key: Setting(key, value, origin) for key, value in said.items()}))


def to_document(settings: Settings) -> dict[str, Any]:
    """The launch file with `settings`, in the spelling that `accelerate launch` reads too."""
    document: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _kind(settings)}
    for name in sorted(settings):
        if name == "strategy":
            continue
        key = KEYS[name]
        section, _, word = key.in_file.rpartition(".")
        inside = document.setdefault(section, {}) if section else document
        inside[word] = key.write(settings[name].value)
    return document


def write_file(settings: Settings, path: Path) -> None:
    """Write `settings` to a launch file; create its folder."""
    _dump(to_document(settings), path)


def updated(path: Path) -> None:
    """Rewrite the launch file at `path` as YAML without unknown keys."""
    _dump(without_unknown(parse_file(path)), path)


def _dump(document: Mapping[str, Any], path: Path) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump(dict(document), sort_keys=True))


def _kind(settings: Settings) -> str:
    """`distributed_type`: FSDP, or by the number and the device of processes."""
    if "strategy" in settings and settings["strategy"].value == "fsdp":
        return "FSDP"
    processes = settings["launch.processes"].value if "launch.processes" in settings else 1
    if processes in (None, 1):
        return "NO"
    return "MULTI_CPU" if "cpu" in settings and settings["cpu"].value else "MULTI_GPU"
