"""Settings from files: launch files, written by `windlass config` or `accelerate config`, and recipes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.config.parallel import rows_training
from windlass.config.parallel.keys import Key, Setting, Settings, merge
from windlass.config.parallel.rows_training import (
    MESH_EXPERT,
    MESH_REPLICAS,
    MESH_SHARDS,
    MODEL_AXES,
    TENSOR_POSITIONS,
)
from windlass.config.parallel.table import FLAGS, KEYS, SECTIONS, TOP_LEVEL, UNBUILT, UNBUILT_SECTIONS
from windlass.core.errors import ConfigError, Problem, did_you_mean
from windlass.core.locations import at_home, cache_folder, home_folder
from windlass.core.whole_file import parse_json, read_text, write_whole

_KNOWN = ("compute_environment", "fp16", "parallel", "mpirun_config")
_NO_SAGEMAKER = "is not built; start `windlass launch` on the machines themselves, with LOCAL_MACHINE"


def from_file(path: str | Path) -> Settings:
    """Read a launch file (YAML or JSON). Errors become problems of the result, unknown keys notes."""
    settings = Settings()
    try:
        document = parse_file(at_home(path))
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); `windlass config` writes one"
        settings.problems.append(Problem("--config_file", str(path), fix))
        return settings
    except ValueError as error:
        settings.problems.append(Problem("--config_file", str(path), f"is not valid: {error}"))
        return settings
    return from_document(document, str(path))


def parse_file(path: Path) -> Mapping[str, Any]:
    """Read the mapping in a YAML or JSON file. Raises OSError if the file cannot be read, and ValueError if it holds
    something else.
    """
    import yaml

    from windlass.config.documents import LaunchLoader, load_yaml

    text = read_text(path)
    try:
        document = parse_json(text) if path.suffix == ".json" else load_yaml(text, LaunchLoader)[0]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ValueError(f"it must be a mapping of keys to values, and is {type(document).__name__}")
    return document


def from_document(document: Mapping[str, Any], name: str) -> Settings:
    settings = Settings()
    for word, value in document.items():
        _top_level(settings, str(word), value, name)
    return settings


def without_unknown(document: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for word, value in document.items():
        if word in SECTIONS and isinstance(value, Mapping) and word not in UNBUILT_SECTIONS:
            kept[word] = {inner: item for inner, item in value.items() if inner in SECTIONS[word]}
        elif word in _KNOWN or word in TOP_LEVEL or word in FLAGS or word in SECTIONS:
            kept[word] = value
    return kept


def _top_level(settings: Settings, word: str, value: Any, name: str) -> None:
    origin = f"{word} in {name}"
    if word == "compute_environment":
        if value not in ("LOCAL_MACHINE", 0, None):
            settings.problems.append(Problem(origin, value, _NO_SAGEMAKER))
    elif word == "fp16":  # before there was `mixed_precision`
        settings.record(KEYS["precision"], "fp16" if value is True else None, origin, "file")
    elif word == "parallel":
        _nested(settings, value, origin)
    elif word == "mpirun_config":
        _section(settings, value, origin, {w: TOP_LEVEL[w] for w in ("mpirun_hostfile", "mpirun_ccl")}, name)
    elif word in UNBUILT_SECTIONS:
        if value:
            settings.notes.append(f"{origin} is not used: what it configures is not built yet")
    elif word in SECTIONS:
        _section(settings, value, origin, SECTIONS[word], name)
    elif key := (TOP_LEVEL.get(word) or FLAGS.get(word)):
        settings.record(key, value, origin, "file")
    else:
        hint = did_you_mean(word, [*TOP_LEVEL, *SECTIONS])
        settings.notes.append(f"{name} has a key {word!r} that means nothing here{hint}")


def _section(settings: Settings, value: Any, origin: str, words: Mapping[str, Key], name: str) -> None:
    section = origin.partition(" ")[0]
    for word, raw in _mapping(settings, value, origin).items():
        if word in words:
            settings.record(words[word], raw, f"{section}.{word} in {name}", "file")
        else:
            hint = did_you_mean(str(word), words)
            settings.notes.append(f"{name} has a key '{section}.{word}' that means nothing here{hint}")


def _mapping(settings: Settings, section: Any, origin: str) -> Mapping[Any, Any]:
    if section is not None and not isinstance(section, Mapping):
        settings.problems.append(Problem(origin, section, "must be a section of keys and values"))
        return {}
    return section or {}


# `parallel: {tp: 2}` is short for `parallel: {mesh: {tp: 2}}`.
_AXES = {key.words[1]: key.name for key in (MESH_REPLICAS, MESH_SHARDS, *MODEL_AXES, MESH_EXPERT)}
_AXES[TENSOR_POSITIONS.words[0]] = TENSOR_POSITIONS.name


def from_recipe(section: Any, name: str) -> Settings:
    """Read the `parallel:` section of recipe `name`, which has canonical names: `fsdp: {cpu_offload: true}`."""
    settings = Settings()
    _nested(settings, section, f"parallel in {name}")
    return settings


def _nested(settings: Settings, section: Any, origin: str) -> None:
    _, _, name = origin.partition(" in ")
    built = [key for key in KEYS if KEYS[key] not in UNBUILT and not KEYS[key].refused]
    for word, raw in _flat(_mapping(settings, section, origin)):
        where = f"parallel.{word} in {name}"
        word = _AXES.get(word, word)
        if word in KEYS:
            settings.record(KEYS[word], raw, where, "file", implicit=False)
        else:
            hint = did_you_mean(word, built) or f"; known keys: {', '.join(built)}"
            settings.problems.append(Problem(where, raw, f"there is no such setting{hint}"))


def _flat(section: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for word, value in section.items():
        path = f"{before}{word}"
        if isinstance(value, Mapping) and path not in KEYS:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


FILE_NAME = "default_config.yaml"


def default_file(environ: Mapping[str, str]) -> Path:
    """Where `windlass config` writes: in `$WINDLASS_HOME`, else in `~/.cache/windlass`."""
    return home_folder(environ) / FILE_NAME


def find_file(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Find the launch file to read if none is named, and a note to log about it.

    Without one of Windlass, that of `accelerate config` is used. There is none for a user who has no home, or cannot
    enter it.
    """
    with contextlib.suppress(ConfigError):
        own = default_file(environ)
        if os.path.isfile(own):  # `Path.is_file` raises in a folder that may not be entered
            return own, ""
    # As accelerate finds it, so that a machine that was set up for it launches the same way.
    with contextlib.suppress(ConfigError):
        home = environ.get("HF_HOME") or cache_folder(environ) / "huggingface"
        for name in (FILE_NAME, "default_config.json"):
            other = at_home(home) / "accelerate" / name
            if os.path.isfile(other):
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


def updated(path: Path) -> list[str]:
    """Rewrite the launch file at `path` without unknown keys, and return those. Raises ConfigError if it has no other
    keys: then it is another file, such as a recipe, of which nothing would be left.
    """
    document = parse_file(path)
    kept = without_unknown(document)
    if document and not kept:
        fix = "has no key of a launch file, and is left as it is; `windlass config` writes one"
        raise ConfigError(Problem("--config_file", str(path), fix))
    _dump(kept, path)
    removed = []
    for word, value in document.items():
        inner = value if isinstance(value, Mapping) and word in kept else {}
        removed += (
            [word] if word not in kept else [f"{word}.{name}" for name in inner if name not in kept[word]]
        )
    return removed


def _dump(document: Mapping[str, Any], path: Path) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = dict(document)
    # As it is read: by its ending (`parse_file`).
    as_json = path.suffix == ".json"
    text = (
        json.dumps(whole, indent=2, sort_keys=True) + "\n"
        if as_json
        else yaml.safe_dump(whole, sort_keys=True)
    )
    write_whole(path, text)


def _kind(settings: Settings) -> str:
    """`distributed_type`: FSDP, or by the number and the device of processes."""
    if "strategy" in settings and settings["strategy"].value == "fsdp":
        return "FSDP"
    processes = settings["launch.processes"].value if "launch.processes" in settings else 1
    if processes in (None, 1):
        return "NO"
    return "MULTI_CPU" if "cpu" in settings and settings["cpu"].value else "MULTI_GPU"
