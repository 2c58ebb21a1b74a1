"""Settings on their way through the environment, from a launcher to its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from windlass.config.parallel.keys import Key
from windlass.config.parallel.kinds import anything
from windlass.config.parallel.settings import Setting, Settings
from windlass.config.parallel.table import KEYS, VARIABLES
from windlass.core.errors import ConfigError, Problem

OWN_VARIABLE = "WINDLASS_PARALLEL"
# Switches without which accelerate reads none of the variables that begin so.
_SWITCHES = {"FSDP_": "ACCELERATE_USE_FSDP", "PARALLELISM_CONFIG_": "ACCELERATE_USE_PARALLELISM_CONFIG"}


def _alone(name: str, reason: str, written: str | None = None) -> Key:
    """A variable that only the environment can say."""
    return Key(name, anything, None, "Not built.", "file", (name,), written=written, refused=reason)


# Engines that are not built (refusing the switch refuses the variables that mean nothing without it), and variables
# that have no setting.
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": KEYS["launch.use_deepspeed"],
    "ACCELERATE_USE_MEGATRON_LM": KEYS["launch.use_megatron_lm"],
    "ACCELERATE_USE_SAGEMAKER": KEYS["file.use_sagemaker"],
    "ACCELERATE_CPU_AFFINITY": _alone(
        "cpu_affinity",
        "is not read: `windlass launch --enable_cpu_affinity` binds processes to their cores",
        "0",
    ),
    "ACCELERATE_TORCH_DEVICE": _alone(
        "torch_device",
        "is not read: a process takes the accelerator of its own rank; say --cpu to leave them alone",
    ),
}


def from_environment(environ: Mapping[str, str]) -> Settings:
    """What the launcher of this process said.

    `windlass launch` says all of it in one variable. Other launchers and shells say it in `ACCELERATE_*`, `FSDP_*`
    and `PARALLELISM_CONFIG_*`, which are read when that one is not there.
    """
    own = environ.get(OWN_VARIABLE)
    return _foreign(environ) if own is None else _own(own)


def to_environment(settings: Settings) -> str:
    """The text of `WINDLASS_PARALLEL` that `from_environment` reads back: {key: [value, origin, weak]} as JSON."""
    told = {s.key: [s.value, s.origin, s.weak] for s in settings.values() if not s.key.startswith("launch.")}
    return json.dumps(told)


def _own(text: str) -> Settings:
    try:
        told = json.loads(text)
        settings = [
            Setting(name, KEYS[name].read(said[0]), str(said[1]), "variable", bool(said[2:] and said[2]))
            for name, said in told.items()
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        fix = f"is set by `windlass launch` and cannot be read ({error!r}); unset it"
        raise ConfigError(Problem(OWN_VARIABLE, text, fix)) from None
    return Settings({setting.key: setting for setting in settings})


def _foreign(environ: Mapping[str, str]) -> Settings:
    settings = Settings()
    for name, key in REFUSED.items():
        settings.say(key, environ.get(name), name, "variable")
    for name, key in VARIABLES.items():
        raw = environ.get(name, "")
        # Empty and "None" are how launchers export what nobody said.
        if raw not in ("", "None") and _is_on(name, environ):
            settings.say(key, raw, name, "variable")
    return settings


def _is_on(name: str, environ: Mapping[str, str]) -> bool:
    if name == "ACCELERATE_USE_PARALLELISM_CONFIG":
        return False
    switch = next((switch for start, switch in _SWITCHES.items() if name.startswith(start)), None)
    return switch is None or environ.get(switch, "false").lower() == "true"
