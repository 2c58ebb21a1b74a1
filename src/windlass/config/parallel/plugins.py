"""Settings out of what a script gives to `Accelerator(...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.arguments import read_section
from windlass.config.parallel.keys import Key
from windlass.config.parallel.settings import Settings
from windlass.config.plugin_base import stated
from windlass.core.errors import ConfigError, Problem

_PLAIN: dict[str, Key] = {
    "mixed_precision": rows.PRECISION,
    "gradient_accumulation_steps": rows.ACCUMULATION,
    "cpu": rows.CPU,
    "dynamo_backend": rows.COMPILE_BACKEND,
}
_SECTIONS = {
    "fsdp_plugin": "fsdp_config",
    "dynamo_plugin": "dynamo_config",
    "parallelism_config": "parallelism_config",
    "ddp_kwargs": "ddp_config",
}
_UNBUILT = {
    "deepspeed_plugin": rows.NO_DEEPSPEED,
    "deepspeed_plugins": rows.NO_DEEPSPEED,
    "megatron_lm_plugin": rows.NO_MEGATRON,
}
# What these constructor arguments are when nobody meant them.
_UNMEANT: dict[str, Any] = {"gradient_accumulation_steps": 1, "cpu": False}


def from_plugins(given: Mapping[str, Any], where: str = "Accelerator") -> Settings:
    """What a script says in code.

    Args:
        given: constructor argument -> value, for those of "mixed_precision", "gradient_accumulation_steps", "cpu",
            "dynamo_backend", "dynamo_plugin", "fsdp_plugin", "parallelism_config", "ddp_kwargs" (the handler of
            DDP's options), "deepspeed_plugin", "deepspeed_plugins" and "megatron_lm_plugin". Plugins as themselves,
            or as mappings of what was said. None says nothing.
        where: whose arguments they are, for messages.
    """
    settings = Settings()
    for name, value in given.items():
        origin = f"{where}({name}=)"
        if value is None:
            continue
        if name in _UNBUILT:
            settings.problems.append(Problem(origin, type(value).__name__, _UNBUILT[name]))
        elif name in _PLAIN:
            weak = name in _UNMEANT and value == _UNMEANT[name]
            settings.say(_PLAIN[name], value, origin, "script", weak)
        else:
            _plugin(settings, name, value, origin)
    return settings


def _plugin(settings: Settings, name: str, plugin: Any, origin: str) -> None:
    if name == "fsdp_plugin":
        settings.say(rows.STRATEGY, "fsdp", origin, "script", weak=False)
    try:
        said = _said(plugin)
    except ConfigError as error:
        settings.problems += error.problems
        return
    read_section(settings, said, _SECTIONS[name], origin)


def _said(plugin: Any) -> Any:
    """What was said in a plugin, in plain words."""
    if isinstance(plugin, Mapping):
        return dict(plugin)
    if hasattr(plugin, "settings"):
        return plugin.settings()
    if hasattr(plugin, "plan_fields"):
        return plugin.plan_fields()
    return stated(plugin) if dataclasses.is_dataclass(plugin) else plugin
