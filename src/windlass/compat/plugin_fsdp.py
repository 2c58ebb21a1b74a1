"""The FSDP plugin of scripts, in the spellings of FSDP1 or FSDP2, or with PyTorch's own objects.

The table of settings reads its values; FSDP2 is always what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config import kinds
from windlass.config.loop_options import Plugin
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.table import SECTIONS
from windlass.config.plan import ShardPlan
from windlass.config.sections.setting import described
from windlass.config.values import stated
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.logs import warn_of_argument

_KEYS = SECTIONS["fsdp_config"]


def _resharding(raw: Any) -> Any:
    """Read one of FSDP1's strategies from a number, which elsewhere is a number of ranks."""
    return raw if isinstance(raw, bool) else kinds.Either(_TRUTH, rows.SHARDING, says=_RESHARDING)(raw)


_TRUTH = kinds.OneOf("true", "false", also={"true": True, "false": False})
_RESHARDING = f"must be true, false, or one of {', '.join(rows.SHARDING_WORDS)}, or its number from 1"
# Readers of fields whose values have another meaning than in a file.
_OWN_READERS: dict[str, kinds.Reader] = {
    "reshard_after_forward": _resharding,
    "backward_prefetch": kinds.OneOf(*rows.PREFETCH_WORDS, also=kinds.numbered(rows.PREFETCH_WORDS)),
}


@described(SECTIONS["fsdp_config"])
@dataclass
class FullyShardedDataParallelPlugin(Plugin):
    """How a model is sharded over processes. None: not set, so another source may set it.

    Words may have any case. Those that PyTorch numbers may be given by number from 1, or as PyTorch's own enumerations,
    functions and objects.

    Attributes:
        ignored_modules: modules of the model, their names, or a regular expression for the whole name of one.
        mixed_precision_policy: a dtype for all ("bf16"), a dict of `param_dtype`, `reduce_dtype`, `output_dtype`, or
            PyTorch's object.
        state_dict_config, optim_state_dict_config: PyTorch's objects. Checkpoints are always written from host memory,
            whole tensors by the first process; other values are accepted with a warning.
        param_init_fn: refused: parameters on the meta device get the first process's weights.
    """

    argument = "fsdp_plugin"

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignored_modules, Iterator):
            self.ignored_modules = list(self.ignored_modules)  # it is read more than once

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set how checkpoints hold the weights.

        Args:
            state_dict_type: "FULL_STATE_DICT" or "SHARDED_STATE_DICT"; None changes nothing.
        """
        if state_dict_type is not None:
            word = rows.FSDP_STATE.read_for("set_state_dict_type.state_dict_type", state_dict_type)
            self.state_dict_type = rows.FSDP_STATE.write(word)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the dtypes of compute, reduction and outputs.

        Args:
            mixed_precision: what `mixed_precision_policy` takes.
            buffer_autocast: must be False.
            override: replace a policy that is set; otherwise it is kept.

        Raises:
            ConfigError: `buffer_autocast`, since buffers keep their type.
        """
        if buffer_autocast:
            fix = "buffers keep their type; leave it False"
            raise ConfigError(Problem("set_mixed_precision.buffer_autocast", buffer_autocast, fix))
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = mixed_precision

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing: the layers of `model` are determined when it is prepared."""

    def validate_mixed_precision_policy(self) -> None:
        """Raise a `ConfigError` if something here cannot be honoured."""
        self.settings()

    validate_cpu_offload = validate_mixed_precision_policy

    def settings(self) -> dict[str, Any]:
        """Return the fields that are set, by the words of a launch file, with canonical values. Raises ConfigError with
        every problem.
        """
        refuse(self.objections())
        for name in ("state_dict_config", "optim_state_dict_config"):
            _warn_of_state_config(f"{type(self).__name__}.{name}", getattr(self, name))
        said = {word: _reader(word)(value) for _, word, value in self._said() if not _KEYS[word].refused}
        return {word: value for word, value in said.items() if value is not None}

    def ignored_names(self, named_modules: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
        """The names of those modules that were given as objects in `ignored_modules`.

        Args:
            named_modules: those of the model, as from `model.named_modules()`.
        """
        ignored = {id(module) for module in self._ignored() if not isinstance(module, str)}
        return tuple(name for name, module in named_modules if id(module) in ignored)

    def objections(self) -> Iterator[Problem]:
        """Problems of this configuration."""
        where = type(self).__name__
        for field, word, value in self._said():
            if fix := _objection(word, value):
                yield Problem(f"{where}.{field}", value, fix)
        if self.param_init_fn is not None:
            fix = "is not needed: parameters on the meta device get the first process's weights"
            yield Problem(f"{where}.param_init_fn", self.param_init_fn, fix)
        kinds_of = {_kind_of_ignored(module) for module in self._ignored()}
        if "" in kinds_of or len(kinds_of) > 1:
            fix = "must be modules of the model, names of modules, or a regular expression"
            yield Problem(f"{where}.ignored_modules", self.ignored_modules, fix)

    def _ignored(self) -> list[Any]:
        given = self.ignored_modules
        if given is None:
            return []
        return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]

    def _said(self) -> Iterator[tuple[str, str, Any]]:
        """(field, word of a launch file, value) of each field that is set and is in the table."""
        for name, value in stated(self).items():
            if name == "mixed_precision_policy":
                yield from ((f"{name}.{role}", role, dtype) for role, dtype in rows.dtypes_of(value).items())
            elif name == "ignored_modules" and not all(isinstance(each, str) for each in self._ignored()):
                continue  # objects, whose names `ignored_names` finds in the model
            elif name in _KEYS:
                yield name, name, value
        if isinstance(self.auto_wrap_policy, functools.partial):
            given = self.auto_wrap_policy.keywords
            if classes := given.get("transformer_layer_cls"):
                names = sorted(kind.__name__ for kind in classes)
                yield "auto_wrap_policy", "transformer_cls_names_to_wrap", names
            if (least := given.get("min_num_params")) is not None:
                yield "auto_wrap_policy", "min_num_params", int(least)


def fsdp_plugin_of(plan: ShardPlan) -> FullyShardedDataParallelPlugin:
    """The plugin that says what `plan` does, for scripts that read it."""
    dtypes = {role: getattr(plan, role) for role in ("param_dtype", "reduce_dtype", "output_dtype")}
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.reshard,
        mixed_precision_policy={role: dtype for role, dtype in dtypes.items() if dtype} or None,
        auto_wrap_policy=rows.WRAPPING[plan.wrap],
        cpu_offload=plan.cpu_offload,
        ignored_modules=plan.ignored,
        state_dict_type=rows.STATES[plan.state],
        forward_prefetch=plan.forward_prefetch > 0,
        activation_checkpointing=plan.recompute,
        activation_checkpointing_offload=plan.recompute_offload,
        cpu_ram_efficient_loading=plan.ram_efficient,
        transformer_cls_names_to_wrap=list(plan.layers) or None,
        min_num_params=plan.min_parameters if plan.wrap == "size" else None,
    )


def _kind_of_ignored(value: Any) -> str:
    from torch import nn

    return "name" if isinstance(value, str) else "module" if isinstance(value, nn.Module) else ""


def _reader(word: str) -> kinds.Reader:
    return _OWN_READERS.get(word) or _KEYS[word].read


def _objection(word: str, value: Any) -> str:
    """Why a value is refused; empty if it is not."""
    if word not in _KEYS:
        return f"there is no such type: give {', '.join(rows.DTYPE_ROLES)}"
    if _KEYS[word].refused:
        return _KEYS[word].refused if _KEYS[word].would_change(value) else ""
    try:
        _reader(word)(value)
    except ValueError as error:
        return str(error)
    return ""


def _warn_of_state_config(field: str, config: Any) -> None:
    """Warn of state written from a device, or whole tensors on several processes: PyTorch's own defaults."""
    for option in ("offload_to_cpu", "rank0_only"):
        if getattr(config, option, True) is False:
            warn_of_argument(
                f"{field}.{option}=False is accepted as True: checkpoints are written from host memory, whole tensors "
                "by the first process"
            )
