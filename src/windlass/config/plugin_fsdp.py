"""Sharding as scripts configure it, in the words of either version of PyTorch's sharded data parallelism.

Windlass shards with the second version. This object takes the first version's words and PyTorch's own objects as well,
and says all of it in plain words (`settings`), which the resolver of the configuration maps onto one plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config.plugin_base import count_problems, flag_problems, stated
from windlass.core.errors import ConfigError, Problem

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_KINDS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
_ROLES = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")


@dataclass
class FullyShardedDataParallelPlugin:
    """How a model is spread over processes, every one keeping a shard of it. None: not said, so another source may.

    Attributes:
        fsdp_version: 1 or 2, whose words the others are; Windlass runs the second in either case.
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", its number
            from 1, or PyTorch's enumeration.
        reshard_after_forward: the second version's word for it: True frees gathered weights after each forward pass.
        backward_prefetch: "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", its number from 1, or PyTorch's enumeration.
        mixed_precision_policy: a type for all ("bf16"), a dict of `param_dtype`, `reduce_dtype`, `output_dtype`, or
            PyTorch's object.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or PyTorch's functions of those.
        cpu_offload: parameters, gradients and optimizer state stay in host memory; True, or PyTorch's object.
        ignored_modules: what is not sharded: modules, or a regular expression of their names.
        state_dict_type: "SHARDED_STATE_DICT" (the default: every rank writes its shards) or "FULL_STATE_DICT": how
            checkpoints hold it.
        state_dict_config, optim_state_dict_config: PyTorch's objects. Checkpoints are written from the host by the
            process that owns the data, so only that may be said.
        limit_all_gathers, use_orig_params, sync_module_states: without meaning in the second version.
        param_init_fn: refused: what the meta device holds is filled with the first process's weights.
        forward_prefetch: gather the next layer while this one computes.
        activation_checkpointing: recompute the activations of each wrapped layer.
        activation_checkpointing_offload: refused.
        cpu_ram_efficient_loading: only the first process of a machine holds the weights before they are sharded.
        transformer_cls_names_to_wrap: class names of the layers that are gathered one by one.
        min_num_params: size from which on a module is gathered by itself, for "size_based_wrap".
    """

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

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Say how checkpoints hold the weights: "FULL_STATE_DICT" or "SHARDED_STATE_DICT"."""
        if state_dict_type is not None:
            self.state_dict_type = _word(state_dict_type, STATE_KINDS)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute, reduce and give results in one type, unless a policy was said and `override` is false."""
        if buffer_autocast:
            fix = "buffers keep their type; leave it False"
            raise ConfigError(Problem("set_mixed_precision.buffer_autocast", buffer_autocast, fix))
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = mixed_precision

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing to do: the layers are looked up in the model when it is prepared."""

    def validate_mixed_precision_policy(self) -> None:
        """Raise a `ConfigError` if something here cannot be honoured."""
        self.settings()

    validate_cpu_offload = validate_mixed_precision_policy

    def settings(self) -> dict[str, Any]:
        """What was said, by field name, in plain words: strings, numbers, booleans, and lists and dicts of them.

        Raises:
            ConfigError: something that cannot be honoured, all of it at once.
        """
        if problems := list(self.objections()):
            raise ConfigError(problems)
        said = {name: _PLAIN.get(name, _same)(value) for name, value in stated(self).items()}
        if isinstance(self.auto_wrap_policy, functools.partial):
            said |= _wrapping_options(self.auto_wrap_policy)
        for name in ("state_dict_config", "optim_state_dict_config"):
            said.pop(name, None)
        if not isinstance(self.ignored_modules, str):
            said.pop("ignored_modules", None)
        return said

    def ignored_names(self, named_modules: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
        """The names of those modules that were given as objects in `ignored_modules`."""
        if self.ignored_modules is None or isinstance(self.ignored_modules, str):
            return ()
        ignored = {id(module) for module in self.ignored_modules}
        return tuple(name for name, module in named_modules if id(module) in ignored)

    def objections(self) -> Iterator[Problem]:
        """What of this cannot be honoured."""
        where = type(self).__name__
        if self.fsdp_version not in (None, 1, 2):
            yield Problem(f"{where}.fsdp_version", self.fsdp_version, "must be 1 or 2")
        for name, change in _PLAIN.items():
            value = getattr(self, name)
            try:
                if value is not None:
                    change(value)
            except ValueError as error:
                yield Problem(f"{where}.{name}", value, str(error))
        yield from flag_problems(self, _FLAGS)
        yield from count_problems(self, ("min_num_params",), least=0)
        yield from self._refusals(where)

    def _refusals(self, where: str) -> Iterator[Problem]:
        if self.param_init_fn is not None:
            fix = "is not needed: weights on the meta device are filled with the first process's"
            yield Problem(f"{where}.param_init_fn", self.param_init_fn, fix)
        if self.activation_checkpointing_offload:
            fix = "is not built: activations are recomputed, not moved to the host"
            yield Problem(f"{where}.activation_checkpointing_offload", True, fix)
        for name in ("state_dict_config", "optim_state_dict_config"):
            yield from _state_config_problems(f"{where}.{name}", getattr(self, name))


_FLAGS = (
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)


def _same(value: Any) -> Any:
    return value


def _word(value: Any, words: tuple[str, ...]) -> str:
    """One of `words`, said as itself in any case, as its number from 1, or as a member of an enumeration."""
    said = getattr(value, "name", value)
    text = str(said).upper()
    if text.isdigit() and 1 <= int(text) <= len(words):
        return words[int(text) - 1]
    if text in words:
        return text
    raise ValueError(f"must be one of {', '.join(words)}, or its number from 1")


def _resharding(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    return _word(value, SHARDING)


def _precision(value: Any) -> dict[str, str]:
    """The type of each role; what a policy leaves open is left out."""
    if isinstance(value, str) or type(value).__name__ == "dtype":
        return dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), _dtype(value))
    found = value if isinstance(value, dict) else {role: getattr(value, role, None) for role in _ROLES}
    unknown = sorted(set(found) - set(_ROLES))
    if unknown:
        raise ValueError(f"has no {', '.join(unknown)}: give {', '.join(_ROLES)}")
    return {role: _dtype(dtype) for role, dtype in found.items() if dtype is not None}


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError("types must be of fp32, fp16 and bf16")
    return _DTYPES[name]


def _wrapping(value: Any) -> str:
    if isinstance(value, str):
        return _word(value, WRAPPING)
    function = value.func if isinstance(value, functools.partial) else value
    known = {"transformer_auto_wrap_policy": WRAPPING[0], "size_based_auto_wrap_policy": WRAPPING[1]}
    name = getattr(function, "__name__", "")
    if name not in known:
        raise ValueError(
            f"must be one of {', '.join(WRAPPING)}: a function of one's own is not called; name the layers' classes in "
            "transformer_cls_names_to_wrap"
        )
    return known[name]


def _wrapping_options(policy: functools.partial[Any]) -> dict[str, Any]:
    """What PyTorch's wrapping functions were given, in this plugin's words."""
    options: dict[str, Any] = {}
    if classes := policy.keywords.get("transformer_layer_cls"):
        options["transformer_cls_names_to_wrap"] = sorted(c.__name__ for c in classes)
    if (least := policy.keywords.get("min_num_params")) is not None:
        options["min_num_params"] = int(least)
    return options


def _offload(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    kind = type(value).__name__
    if kind == "CPUOffload":
        return bool(value.offload_params)
    if kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    raise ValueError("must be True, False, or PyTorch's CPUOffload, CPUOffloadPolicy or OffloadPolicy")


def _state_kind(value: Any) -> str:
    word = _word(value, STATE_KINDS)
    if word == "LOCAL_STATE_DICT":
        raise ValueError("cannot be read into another number of processes; use SHARDED_STATE_DICT")
    return word


def _class_names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError("must be class names, as a list or joined by commas")
    return [name.strip() for name in names]


def _state_config_problems(field: str, config: Any) -> Iterator[Problem]:
    """State is written from the host, and whole tensors by the first process; only that can be asked for."""
    for option in ("offload_to_cpu", "rank0_only"):
        if getattr(config, option, True) is False:
            fix = "checkpoints are written from host memory, whole tensors by the first process; leave both True"
            yield Problem(f"{field}.{option}", False, fix)


# field -> what makes a plain value of what scripts write there; a ValueError says what is wrong with it
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "sharding_strategy": functools.partial(_word, words=SHARDING),
    "reshard_after_forward": _resharding,
    "backward_prefetch": functools.partial(_word, words=PREFETCH),
    "mixed_precision_policy": _precision,
    "auto_wrap_policy": _wrapping,
    "cpu_offload": _offload,
    "state_dict_type": _state_kind,
    "transformer_cls_names_to_wrap": _class_names,
}
