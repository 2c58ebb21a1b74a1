"""Old names of arguments, what each means now, and the metaclass that lets a dataclass accept them.

A dataclass generates `__init__` again in each subclass, so only the call of the class sees all constructions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from windlass.config.kinds import flag
from windlass.config.sections.setting import default_of, rules_of
from windlass.config.values import hints
from windlass.core import xla
from windlass.core.errors import ConfigError, Problem, did_you_mean, refuse
from windlass.core.logs import warn_of_argument

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Old:
    """One old name."""

    new: str | None  # the field that replaced it; None if there is none
    kind: type = str  # its type on a command line
    neutral: tuple[Any, ...] = (None,)  # values that request nothing; the first was its default
    # (value, all arguments) -> value of the new field
    carry: Callable[[Any, Given], Any] = lambda value, _: value
    back: Callable[[Any], Any] = lambda value: value  # value of the new field -> value of the old name
    note: str = ""  # why it was removed, or what to do instead, as the end of the sentence "NAME ..."
    refused: bool = False  # a value that is not neutral is an error

    @property
    def default(self) -> Any:
        """Its former default."""
        return self.neutral[0]

    def read(self, value: Any) -> Any:
        """The value; of a switch as a bool, also if it is a text, 0 or 1. Raises ValueError if it is none of these."""
        return value if self.kind is not bool or value is None else flag(value)

    def says_nothing(self, value: Any) -> bool:
        return any(
            value is neutral or (type(value) is type(neutral) and value == neutral)
            for neutral in self.neutral
        )


def _switch(new: str, value: object) -> Old:
    """An old flag that selected one value of a field."""
    return Old(new, bool, (False, None), carry=lambda _, __: value, back=lambda now: now == value)


def _gone(note: str, kind: type = str, neutral: tuple[Any, ...] = (None,)) -> Old:
    """A name without effect; setting it logs a warning."""
    return Old(None, kind, neutral, note=note)


def _refused(note: str, kind: type = str, neutral: tuple[Any, ...] = (None,)) -> Old:
    return Old(None, kind, neutral, note=note, refused=True)


def _with_inputs(_: Any, given: Given) -> list[str]:
    return list(dict.fromkeys([*(given.get("include_for_metrics") or []), "inputs"]))


def _hub_id(organization: Any, given: Given) -> str:
    name = (
        given.get("hub_model_id")
        or given.get("push_to_hub_model_id")
        or given.get("output_dir")
        or "trainer_output"
    )
    return f"{organization}/{os.path.basename(os.path.normpath(str(name)))}"


def _into(field: str, key: str) -> Callable[[Any, Given], Any]:
    def carry(value: Any, given: Given) -> Any:
        config = given.get(field)
        return {**config, key: value} if isinstance(config, dict) else {key: value}

    return carry


def _agree(present: Any, carried: Any) -> bool:
    """Return True if the value of the new name (of a dict, each item) does not change."""
    if isinstance(present, dict) and isinstance(carried, dict):
        return {**carried, **present} == carried
    return bool(present == carried)


def _fsdp_option(key: str, kind: type = str, neutral: tuple[Any, ...] = (None,)) -> Old:
    """An old argument that is now an item of `fsdp_config`."""
    carry = _into("fsdp_config", key)
    return Old("fsdp_config", kind, neutral, carry, back=lambda now: (now or {}).get(key, neutral[0]))


def _debug(_: Any, given: Given) -> str:
    return " ".join(filter(None, [str(given.get("debug") or ""), "tpu_metrics_debug"]))


_APEX = "chose between Apex and PyTorch mixed precision; there is only PyTorch's, enabled by fp16 or bf16"

OLD_NAMES: dict[str, Old] = {
    "evaluation_strategy": Old("eval_strategy"),
    "warmup_ratio": Old("warmup_steps", float, (0.0, 0, None), back=lambda now: now if now < 1 else 0.0),
    "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
    "no_cuda": Old("use_cpu", bool, (False, None)),
    "adafactor": _switch("optim", "adafactor"),
    "torchdynamo": Old("torch_compile_backend"),
    "include_tokens_per_second": Old(
        "include_num_input_tokens_seen", bool, (False, None), lambda _, __: "all", lambda now: now not in ("no", False)
    ),
    "include_inputs_for_metrics": Old(
        "include_for_metrics", bool, (False, None), carry=_with_inputs, back=lambda now: "inputs" in now
    ),
    "per_gpu_train_batch_size": Old("per_device_train_batch_size", int),
    "per_gpu_eval_batch_size": Old("per_device_eval_batch_size", int),
    "push_to_hub_token": Old("hub_token"),
    "push_to_hub_model_id": Old("hub_model_id"),
    "push_to_hub_organization": Old(
        "hub_model_id", carry=_hub_id, back=lambda now: now.rpartition("/")[0] or None if now else None
    ),
    "fsdp_min_num_params": _fsdp_option("min_num_params", int, (0, None)),
    "fsdp_transformer_layer_cls_to_wrap": _fsdp_option("transformer_layer_cls_to_wrap"),
    "tpu_metrics_debug": Old("debug", bool, (False, None), carry=_debug, back=lambda now: "tpu_metrics_debug" in now),
    "xpu_backend": Old("ddp_backend"),
    "split_batches": Old("accelerator_config", bool, (None,), carry=_into("accelerator_config", "split_batches")),
    "dispatch_batches": Old(
        "accelerator_config", bool, (None,), carry=_into("accelerator_config", "dispatch_batches")
    ),
    "logging_dir": _gone(
        "has no effect: the folder of TensorBoard is now set by the environment (TENSORBOARD_LOGGING_DIR); "
        "metrics.jsonl and report.html are in output_dir"
    ),
    "overwrite_output_dir": _gone(
        "has no effect: an output folder is never emptied, and training resumes only if train() is asked to",
        bool,
        (False, None)
    ),
    "use_mps_device": _gone("is not needed: Apple's GPU is selected automatically", bool, (False, None)),
    "fp16_opt_level": _gone(_APEX, str, ("O1", None)),
    "fp16_backend": _gone(_APEX, str, ("auto", "amp", "cuda_amp", "cpu_amp", None)),
    "half_precision_backend": _gone(_APEX, str, ("auto", "amp", "cuda_amp", "cpu_amp", None)),
    "save_safetensors": _gone(
        "has no effect: weights are always written as safetensors, never as pickle", bool, (True, None)
    ),
    "jit_mode_eval": _refused("is gone with TorchScript; use torch_compile", bool, (False, None)),
    "use_ipex": _refused("is gone; PyTorch's own CPU and XPU kernels are used", bool, (False, None)),
    "past_index": _refused("is gone: no state is carried from batch to batch", int, (-1, None)),
    "mp_parameters": _refused("belonged to SageMaker's model parallelism, which is not built", str, ("", None)),
    "_n_gpu": _refused("is gone: one process drives one device; start one process per GPU", int, (-1, 0, 1, None)),
    "use_legacy_prediction_loop": _refused("is gone: there is one evaluation loop", bool, (False, None)),
    "tpu_num_cores": _gone("is not needed: one process drives all devices of PyTorch/XLA", int, (None,)),
    "ray_scope": _refused("belongs to the schedulers of Ray Tune, which are not used", str, ("last", None)),
}  # fmt: skip

# Two names of one choice: setting either sets both, and the newer decides.
TWINS = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
BOTH_WAYS = {**TWINS, **{new: old for old, new in TWINS.items()}}


def announce(name: str) -> None:
    """Log once what replaced an old name."""
    old = OLD_NAMES[name]
    if old.new:
        warn_of_argument(f"the argument {name!r} is now {old.new!r}; using that")
    else:
        warn_of_argument(f"the argument {name!r} {old.note}")


def translate(given: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return `given` with new names only, and problems: contradictions, and what cannot be honoured."""
    arguments = {name: value for name, value in given.items() if name not in OLD_NAMES}
    problems: list[Problem] = []
    for name in (n for n in OLD_NAMES if n in given):
        value, old = given[name], OLD_NAMES[name]
        if value is not None:
            announce(name)
        try:
            value = old.read(value)
        except ValueError as error:
            problems.append(Problem(name, value, str(error)))
            continue
        if old.says_nothing(value):
            continue
        problem = _objection(name, value, given)
        if problem is not None:
            problems.append(problem)
        elif old.new is not None:
            arguments[old.new] = old.carry(value, {**given, **arguments})
    return arguments, problems


# Old names that add to their new field, and so never contradict it.
_MERGED = ("include_inputs_for_metrics", "tpu_metrics_debug", "push_to_hub_organization")


def _objection(name: str, value: Any, given: Given) -> Problem | None:
    """The problem if old `name` cannot have this value, or contradicts its new name."""
    old = OLD_NAMES[name]
    if old.refused:
        return Problem(name, value, old.note)
    if name == "tpu_num_cores" and not xla.is_selected():
        return Problem(name, value, xla.NEEDED)
    if name == "warmup_ratio" and not (isinstance(value, (int, float)) and 0 <= value < 1):
        return Problem(name, value, "must be a share of all updates, at least 0 and below 1")
    present = given.get(old.new) if old.new else None
    if name in _MERGED or present is None or _agree(present, old.carry(value, given)):
        return None
    if name.endswith("_token"):
        value = present = "***"
    return Problem(name, value, f"contradicts {old.new}={present!r}; give {old.new} alone")


def twin_problems(given: Given) -> list[Problem]:
    """Both names of one choice, given with different values."""
    return [
        Problem(old, given[old], f"contradicts {new}={given[new]!r}; give {new} alone")
        for old, new in TWINS.items()
        if given.get(old) is not None and given.get(new) is not None and given[old] != given[new]
    ]


# Names of other libraries, which are not similar to the right ones.
HABITS = {
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "steps": "max_steps",
    "scheduler": "lr_scheduler_type",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "accumulate_grad_batches": "gradient_accumulation_steps",
}
# Arguments of other classes that people look for in this one.
_ANSWERS = (
    "is of trainers that know the prompts of their rows: use SFTConfig with SFTTrainer for a causal model, which takes "
    "tokenized rows too, or Seq2SeqTrainingArguments with Seq2SeqTrainer"
)
_ELSEWHERE = dict.fromkeys(
    ("predict_with_generate", "eval_prompts", "eval_prompts_limit", "eval_metrics", "generation_max_new_tokens",
     "generation_max_length", "generation_num_beams", "generation_do_sample"),
    _ANSWERS
) | {
    f"{axis}_size": f"is of the layout: pass parallelism_config=ParallelismConfig({axis}_size=...)"
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
} | {"mixed_precision": "is of Accelerator: pass bf16=True or fp16=True"}  # fmt: skip


Instance = TypeVar("Instance")


class AcceptsOldNames(type):
    """`cls(**names)` translates old names, refuses unknown ones, and raises all problems together."""

    # Annotated so that type checkers read the arguments from the dataclass.
    def __call__(cls: type[Instance], *args: Any, **given: Any) -> Instance:
        parameters = _parameters(cls)  # type: ignore[arg-type]
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        in_order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        given, clashes = _with_own_names(cls, given)
        positional = dict(zip(in_order, args, strict=False))
        everything = {**positional, **given, **_old_fields(cls, given)}
        arguments, problems = translate(everything)
        problems += clashes
        # An old name that the class declares itself is also passed on.
        arguments.update({name: given[name] for name in OLD_NAMES if name in given and name in names})
        # `replace(args, ...)` and `cls(**args.to_dict())` give all fields, so they do not show what was requested.
        copied = {field.name for field in dataclasses.fields(cls) if field.init} <= given.keys()  # type: ignore[arg-type]
        if copied:
            _settle_twins(arguments)
        problems += twin_problems(arguments)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            problems += _unknown(arguments, names)
            arguments = {name: value for name, value in arguments.items() if name in names}
        keywords = {name: v for name, v in arguments.items() if name not in positional or name in given}
        try:
            instance: Instance = type.__call__(cls, *args, **keywords)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        refuse(problems)
        if not copied:
            instance.__dict__["_given"] = dict.fromkeys(arguments)
        instance.__dict__["_old"] = {n: v for n, v in given.items() if n in OLD_NAMES and n not in names}
        if not copied:
            _log_notes(cls, everything)
        return instance

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields with types and defaults: `help`, notebooks and editors would show the one of `__call__`."""
        types, made = hints(cls), {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.default_factory is not dataclasses.MISSING:
                made[field.name] = field.default_factory()
        return inspect.Signature(
            [
                p.replace(annotation=types.get(p.name, p.annotation), default=made.get(p.name, p.default))
                for p in _parameters(cls)
            ]
        )


@functools.cache
def _parameters(cls: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(cls.__init__).parameters.values())[1:]


def _with_own_names(cls: Any, given: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """`given` with today's names for those of `EARLIER_NAMES`, which one class alone had; and contradictions."""
    renamed, problems = dict(given), []
    for old, new in getattr(cls, "EARLIER_NAMES", {}).items():
        value = renamed.pop(old, None)
        if value is None:
            continue
        if renamed.setdefault(new, value) != value:
            problems.append(
                Problem(old, value, f"contradicts {new}={renamed[new]!r}, its new name; set only that")
            )
        warn_of_argument(f"the argument {old!r} is now {new!r}; using that")
    return renamed, problems


def _old_fields(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of old names that a script declares as fields of its subclass."""
    fields: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
    declared = {name: field for name, field in fields.items() if name in OLD_NAMES}
    return {name: given[name] if name in given else default_of(field) for name, field in declared.items()}


def _settle_twins(arguments: dict[str, Any]) -> None:
    """Let the newer of two names of one choice decide, in a copy in which they differ."""
    for old, new in TWINS.items():
        if old in arguments and new in arguments and arguments[old] != arguments[new]:
            warn_of_argument(
                f"a copy of the arguments holds two values for {old!r} and {new!r}; using {new!r}"
            )
            arguments[old] = arguments[new]


def _unknown(arguments: Mapping[str, Any], names: tuple[str, ...]) -> list[Problem]:
    known = [*names, *OLD_NAMES]
    return [
        Problem(
            name,
            value,
            _ELSEWHERE.get(name) or f"there is no such argument{did_you_mean(HABITS.get(name, name), known)}",
        )
        for name, value in arguments.items()
        if name not in names
    ]


def _log_notes(cls: Any, given: Mapping[str, Any]) -> None:
    """Log once the effect of arguments whose value does not do what their name says."""
    for name, rules in rules_of(cls).items():
        if rules.noted_at is not None and given.get(name) == rules.noted_at:
            warn_of_argument(f"the argument {name!r} is accepted, and {rules.mapped}")
