"""Settings from the launcher: from its flags, and from the environment in which it passes them to its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windlass.config.kinds import anything
from windlass.config.parallel.keys import FAMILIES, Key, Setting, Settings
from windlass.config.parallel.table import FLAGS, KEYS, VARIABLES
from windlass.core.errors import ConfigError, Problem

OWN_VARIABLE = "WINDLASS_PARALLEL"


def _alone(name: str, reason: str, written: str | None = None) -> Key:
    """A setting that only a variable can set."""
    return Key(name, anything, None, "Not built.", "file", (name,), written=written, refused=reason)


# Engines that are not built (refusing the switch refuses the variables that depend on it), and variables without a
# setting.
REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": KEYS["launch.use_megatron_lm"],
    "ACCELERATE_USE_SAGEMAKER": KEYS["file.use_sagemaker"],
    "ACCELERATE_CPU_AFFINITY": _alone(
        "cpu_affinity",
        "is not read: `windlass launch --enable_cpu_affinity` binds processes to their cores",
        "0",
    ),
    "ACCELERATE_TORCH_DEVICE": _alone(
        "torch_device",
        "is not read: a process uses the accelerator of its own rank; use --cpu to disable accelerators",
    ),
}


def from_flags(options: Mapping[str, Any]) -> Settings:
    """Read the settings on the command line. `options` is flag without dashes -> value, of which None and False count
    as not given.
    """
    settings = Settings()
    for word, raw in options.items():
        if word in FLAGS and raw is not None and raw is not False:
            settings.record(FLAGS[word], raw, f"--{word}", "flag", implicit=False)
    return settings


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the settings of the launcher of this process.

    `windlass launch` sets one variable with all of them. Without it, the variables of other launchers and shells are
    read: `ACCELERATE_*`, `FSDP_*` and `PARALLELISM_CONFIG_*`.
    """
    own = environ.get(OWN_VARIABLE)
    return _foreign(environ) if own is None else _own(own)


def to_environment(settings: Settings) -> str:
    """The text of `WINDLASS_PARALLEL` that `from_environment` reads back: {key: [value, origin, implicit]} as JSON."""
    shared = [s for s in settings.values() if not s.key.startswith("launch.")]
    return json.dumps({s.key: [s.value, s.origin, s.implicit] for s in shared})


def _own(text: str) -> Settings:
    try:
        settings = [
            Setting(name, KEYS[name].read(value), str(origin), "variable", any(implicit))
            for name, (value, origin, *implicit) in json.loads(text).items()
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        fix = f"is set by `windlass launch` and cannot be read ({error!r}); unset it"
        raise ConfigError(Problem(OWN_VARIABLE, text, fix)) from None
    return Settings({setting.key: setting for setting in settings})


def _foreign(environ: Mapping[str, str]) -> Settings:
    settings = Settings()
    for name, key in REFUSED.items():
        settings.record(key, environ.get(name), name, "variable")
    for name, key in VARIABLES.items():
        raw = environ.get(name, "")
        # Launchers export "" or "None" for what is not set.
        if raw not in ("", "None") and _is_on(key, environ):
            settings.record(key, raw, name, "variable")
    return settings


def _is_on(key: Key, environ: Mapping[str, str]) -> bool:
    """Return True if accelerate would read this variable. The switch of the mesh sets nothing itself."""
    switch = FAMILIES[key.family].switch
    return key.name != "mesh.used" and (not switch or environ.get(switch, "false").lower() == "true")
