"""Settings from a script (the arguments of a run, the sections in them, the arguments of `Accelerator(...)`), and from
the launcher: from its flags, and from the environment in which it passes them to its processes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from windlass.config.enums import ACCELERATOR_REFUSED
from windlass.config.kinds import anything
from windlass.config.parallel import rows_compute
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import FAMILIES, Key, Setting, Settings
from windlass.config.parallel.rows_deepspeed import CONFIG
from windlass.config.parallel.table import FLAGS, KEYS, SECTIONS, TRAINING, VARIABLES
from windlass.config.sections.fields import Fields
from windlass.config.values import stated
from windlass.core.errors import ConfigError, Problem, did_you_mean, unknown

# --- sections -------------------------------------------------------------------------------------------------------


def read_section(settings: Settings, given: Any, section: str, origin: str) -> None:
    """Read a mapping or dataclass with the fields of a launch file's section; None sets nothing."""
    if given is None or given == "":
        return
    given = _with_dtypes(given)
    # A mapping has only what was set; an object also has defaults.
    implicit = False if isinstance(given, Mapping) else None
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
    if not isinstance(given, Mapping):
        settings.problems.append(Problem(origin, given, "must be a mapping, or an object with these fields"))
        return
    known, said = SECTIONS[section], {**given, **_options_in(given)}
    settings.problems += unknown(said, known, f"{origin}.{{}}".format)
    for word in filter(known.get, said):
        settings.record(known[word], said[word], f"{origin}.{word}", "script", implicit)


def _options_in(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """The options in the handlers of a layout. Of objects, those of these two alone change what is computed."""
    found: dict[Any, Any] = {}
    for handler in (given.get(word) for word in rows.HANDLERS):
        if isinstance(handler, Mapping):
            found |= handler
    for handler in (given.get("pp_handler"), given.get("tp_handler")):
        if dataclasses.is_dataclass(handler) and not isinstance(handler, type):
            found |= stated(handler)
    return found


def _with_dtypes(given: Any) -> Any:
    """Replace `mixed_precision_policy`, a dtype for each role or one word for all, by a field for each role."""
    policy = given.get("mixed_precision_policy") if isinstance(given, Mapping) else None
    if not isinstance(policy, str | Mapping) or not policy:
        return given
    others = {word: raw for word, raw in given.items() if word != "mixed_precision_policy"}
    return {**others, **rows.dtypes_of(policy)}


# --- TrainingArguments ----------------------------------------------------------------------------------------------

_OPTIONS = (*rows.SHARDING_WORDS, "offload", "auto_wrap")

# The fields of `TrainingArguments` that are read here.
FIELDS = (
    "fsdp",
    "fsdp_config",
    "fp8_config",
    "parallelism_config",
    "activation_checkpointing",
    *(field for key in TRAINING for field in key.fields),
)


def from_arguments(args: Fields) -> Settings:
    """Read the settings in a script's arguments; a field at its default sets nothing, except the accumulation."""
    settings = Settings()
    _precision(settings, args)
    read_section(settings, args.fp8_config, "fp8_config", "TrainingArguments.fp8_config")
    _say(settings, rows.CPU, args.use_cpu or None, "use_cpu")
    # The loop reads only the arguments, so a launcher that sets another number must be an error.
    _say(settings, rows.ACCUMULATION, args.gradient_accumulation_steps, "gradient_accumulation_steps")
    for key in rows.DDP:
        for field in key.fields:
            settings.record(key, getattr(args, field), f"TrainingArguments.{field}", "script")
    if args.torch_compile:
        _say(
            settings, rows_compute.COMPILE_BACKEND, args.torch_compile_backend or "inductor", "torch_compile"
        )
        _say(settings, rows_compute.COMPILE_MODE, args.torch_compile_mode, "torch_compile_mode")
        _say(settings, rows_compute.COMPILE_BLOCKS, args.torch_compile_blocks or None, "torch_compile_blocks")
    if args.deepspeed:
        _say(settings, rows.STRATEGY, "deepspeed", "deepspeed")
        _say(settings, CONFIG, args.deepspeed, "deepspeed")
    _sharding(settings, args)
    read_section(
        settings, args.parallelism_config, "parallelism_config", "TrainingArguments.parallelism_config"
    )
    return settings


def _say(settings: Settings, key: Any, raw: Any, field: str) -> None:
    settings.record(key, raw, f"TrainingArguments.{field}", "script", implicit=False)


def _precision(settings: Settings, args: Fields) -> None:
    for field in ("fp16", "bf16", "fp8"):
        if getattr(args, field):
            _say(settings, rows.PRECISION, field, field)
            return  # several at once are refused when the arguments are checked


def _sharding(settings: Settings, args: Fields) -> None:
    options = shard_options(args.fsdp)
    if options is not None:
        _say(settings, rows.STRATEGY, "fsdp", "fsdp")
        # By default the model's own layers are wrapped.
        default = "the default of TrainingArguments.fsdp"
        settings.add(Setting(rows.FSDP_WRAP.name, "transformer", default, "script", implicit=True))
        for option in options:
            _option(settings, option)
    read_section(settings, args.fsdp_config, "fsdp_config", "TrainingArguments.fsdp_config")
    if args.activation_checkpointing and settings.value(rows.FSDP_RECOMPUTE):
        fix = "recomputes every layer twice with activation_checkpointing=True; set one of the two"
        settings.problems.append(Problem("TrainingArguments.fsdp_config.activation_checkpointing", True, fix))


def shard_options(fsdp: Any) -> list[str] | None:
    """The words of `fsdp=`; an empty list for a plain True, None when it is off."""
    if fsdp is True:
        return []
    words = _separated(fsdp.replace(",", " ")) if isinstance(fsdp, str) else list(fsdp or [])
    words = [str(getattr(word, "value", word)).lower() for word in words]
    if not words or words in (["false"], ["no"], ["0"]):
        return None
    return [] if words in (["true"], ["yes"], ["1"]) else words


def _separated(text: str) -> list[str]:
    """The options in a text; "full shard" is "full_shard", as a guide prints it."""
    text = text.lower()
    for option in sorted(_OPTIONS, key=len, reverse=True):
        text = text.replace(option.replace("_", " "), option)
    return text.split()


def _option(settings: Settings, option: str) -> None:
    if option == "offload":
        _say(settings, rows.FSDP_OFFLOAD, True, "fsdp")
    elif option in _OPTIONS:
        if option != "auto_wrap":  # it is the default
            _say(settings, rows.FSDP_SHARDING, option, "fsdp")
    else:
        fix = f"{option!r} is not an option; known: {', '.join(_OPTIONS)}{did_you_mean(option, _OPTIONS)}"
        settings.problems.append(Problem("TrainingArguments.fsdp", option, fix))


# --- Accelerator ----------------------------------------------------------------------------------------------------

_PLAIN: dict[str, Key] = {
    "mixed_precision": rows.PRECISION,
    "gradient_accumulation_steps": rows.ACCUMULATION,
    "cpu": rows.CPU,
    "dynamo_backend": rows_compute.COMPILE_BACKEND,
}
_SECTIONS = {
    "fsdp_plugin": "fsdp_config",
    "deepspeed_plugin": "deepspeed_config",
    "dynamo_plugin": "dynamo_config",
    "parallelism_config": "parallelism_config",
    "ddp_kwargs": "ddp_config",
    "float8_kwargs": "fp8_config",
}
# Defaults of constructor arguments, which are not explicit.
_UNMEANT: dict[str, Any] = {"gradient_accumulation_steps": 1, "cpu": False}


def from_plugins(given: Mapping[str, Any]) -> Settings:
    """Read the settings in the arguments of `Accelerator`.

    Args:
        given: constructor argument -> value, for those of "mixed_precision", "gradient_accumulation_steps", "cpu",
            "dynamo_backend", "dynamo_plugin", "fsdp_plugin", "parallelism_config", "ddp_kwargs" and "float8_kwargs"
            (the handlers of DDP and of float8), "deepspeed_plugin" and "megatron_lm_plugin". Plugins as objects, or as
            mappings of what was set. None sets nothing.
    """
    settings = Settings()
    for name, value in given.items():
        origin = f"Accelerator({name}=)"
        if value is None:
            continue
        if name in ACCELERATOR_REFUSED:
            settings.problems.append(Problem(origin, type(value).__name__, ACCELERATOR_REFUSED[name]))
        elif name in _PLAIN:
            implicit = name in _UNMEANT and value == _UNMEANT[name]
            settings.record(_PLAIN[name], value, origin, "script", implicit)
        else:
            _plugin(settings, name, value, origin)
    return settings


def _plugin(settings: Settings, name: str, plugin: Any, origin: str) -> None:
    if name == "fsdp_plugin":
        settings.record(rows.STRATEGY, "fsdp", origin, "script", implicit=False)
    if name == "deepspeed_plugin":
        settings.record(rows.STRATEGY, "deepspeed", origin, "script", implicit=False)
    try:
        said = plugin.settings() if hasattr(plugin, "settings") else plugin
    except ConfigError as error:
        settings.problems += error.problems
        return
    if dataclasses.is_dataclass(said) and not isinstance(said, type):
        # Its `objections` check the other fields.
        said = {word: value for word, value in stated(said).items() if word in SECTIONS[_SECTIONS[name]]}
    read_section(settings, said, _SECTIONS[name], origin)


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
    settings, present = Settings(), set(environ)
    for name in (name for name in REFUSED if name in present):
        settings.record(REFUSED[name], environ[name], name, "variable")
    for name in (name for name in VARIABLES if name in present):
        key, raw = VARIABLES[name], environ[name]
        # Launchers export "" or "None" for what is not set.
        if raw not in ("", "None") and _is_on(key, environ):
            settings.record(key, raw, name, "variable")
    return settings


def _is_on(key: Key, environ: Mapping[str, str]) -> bool:
    """Return True if accelerate would read this variable. The switch of the mesh sets nothing itself."""
    switch = FAMILIES[key.family].switch
    return key.name != "mesh.used" and (not switch or environ.get(switch, "false").lower() == "true")
