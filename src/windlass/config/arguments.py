"""`TrainingArguments`: all settings of a run, as one object of plain data.

It makes no folder, touches no device and does not write the environment. Scripts may assign to it; each `train()` and
`evaluate()` checks it again as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.config import accelerator_config
from windlass.config.accepting import BOTH_WAYS, OLD_NAMES, AcceptsOldNames, translate
from windlass.config.enums import ParallelMode
from windlass.config.kinds import as_declared, mapping
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import dtype_plans
from windlass.config.parallel.rows_training import PRECISION
from windlass.config.parallel.sources import OWN_VARIABLE, from_arguments, from_environment
from windlass.config.sections.fields import Fields
from windlass.config.sections.setting import default_of, described, rules_of
from windlass.config.setters import Setters
from windlass.config.validate import check
from windlass.core.errors import refuse
from windlass.core.locations import anchored, is_url, lies_in, working_folder
from windlass.core.logs import log_levels, script_verbosity
from windlass.core.outside import load_outside
from windlass.core.redact import is_secret_name, redact_text
from windlass.core.turns import main_process_first
from windlass.core.watched_numbers import micro_batch_count, process_count
from windlass.core.world import World, world_from_environment

if TYPE_CHECKING:
    import torch

# Named only, since it is of a higher floor: imported once arguments ask for a stage of DeepSpeed that divides models.
_BUILDING = "windlass.zero.building"


class Helpers(Fields):
    """All fields, and these methods. Each process drives one device."""

    # A run reads `deepspeed` itself. Scripts look if there is one.
    hf_deepspeed_config: ClassVar[None] = None

    @property
    def _world(self) -> World:
        return world_from_environment()

    @property
    def mixed_precision(self) -> str:
        """The type that forwards compute in: "no", "fp16", "bf16" or "fp8"."""
        return next((word for word in PRECISION.fields if getattr(self, word)), "no")

    @property
    def output_path(self) -> str:
        """`output_dir` as an absolute path or URL; a relative one is in the directory in which it was set."""
        return anchored(str(self.output_dir), self.__dict__.get("_base", ""))

    def resolve_path(self, path: str) -> str:
        """Return `path`, as a script gives it, as an absolute path or URL.

        A relative path in `output_dir` is resolved as that is. Others are relative to the working directory, or to the
        directory in which `output_dir` was set if they exist only there.
        """
        base, here = self.__dict__.get("_base", ""), anchored(path, working_folder())
        there = anchored(path, base)
        in_output = lies_in(path, str(self.output_dir)) and not is_url(path)
        return there if in_output or (not os.path.exists(here) and os.path.exists(there)) else here

    @property
    def train_batch_size(self) -> int:
        """Samples of a training loader's batch: of each process; with `split_batches`, of all together."""
        return self.per_device_train_batch_size

    def train_batch_size_of(self, ranks: int) -> int:
        """Samples per process in one forward and backward, of `ranks` with different samples."""
        return self._share("per_device_train_batch_size", ranks)

    @property
    def eval_batch_size(self) -> int:
        """Samples of an evaluation loader's batch: of each process; with `split_batches`, of all together."""
        return self.per_device_eval_batch_size

    def eval_batch_size_of(self, ranks: int) -> int:
        """Samples per process in one evaluation batch, of `ranks` with different samples."""
        return self._share("per_device_eval_batch_size", ranks)

    def _share(self, field: str, ranks: int) -> int:
        return accelerator_config.read(self.accelerator_config).batch_size(field, getattr(self, field), ranks)

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout`, which is in seconds."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def device(self) -> torch.device:
        """The device of this process (imports torch). Raises ConfigError if there are fewer accelerators than processes
        on this machine.
        """
        from windlass.core.device import choose_device

        said = from_environment(os.environ).get("cpu")
        return choose_device(self.use_cpu or (said is not None and said.value), self._world.local_rank)

    @property
    def n_gpu(self) -> int:
        """Accelerators that this process drives: 0 or 1 (imports torch)."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED if the job has several processes, else NOT_PARALLEL."""
        return ParallelMode.DISTRIBUTED if self._world.is_distributed else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return process_count(self._world.size)

    @property
    def process_index(self) -> int:
        """Rank of this process in the job, from 0."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self._world.local_rank

    @property
    def should_log(self) -> bool:
        """True if this process logs: the first of its machine, or of the job with log_on_each_node=False."""
        return self._world.is_local_main if self.log_on_each_node else self._world.is_main

    @property
    def should_save(self) -> bool:
        """True if this process writes the files that all share."""
        return self._world.is_local_main if self.save_on_each_node else self._world.is_main

    @property
    def distributed_state(self) -> Any:
        """The `PartialState` of this process; the first call joins the process group (imports torch)."""
        state = load_outside("the state singletons")
        options = {"timeout": self.ddp_timeout_delta, "backend": self.ddp_backend}
        return state.PartialState(cpu=self.use_cpu, **options)

    @property
    def _names_deepspeed(self) -> bool:
        launched = "deepspeed" in os.environ.get(OWN_VARIABLE, "")
        return bool(self.deepspeed or launched or "ACCELERATE_USE_DEEPSPEED" in os.environ)

    @property
    def deepspeed_plugin(self) -> Any:
        """How DeepSpeed divides the model, for scripts that look; None if it does not."""
        if not self._names_deepspeed:
            return None
        settings = merge(from_arguments(self), from_environment(os.environ))
        precision, dist = dtype_plans(settings)
        if settings.problems or dist.zero is None:
            return None
        return load_outside("plugins of DeepSpeed").plugin_of(dist.zero, precision.compute)

    def _divide_new_models(self) -> Any:
        """Let models of transformers be divided while they are built, for as long as the returned object lives; None
        if nothing asks for it.
        """
        if not self._names_deepspeed:
            return None
        return importlib.import_module(_BUILDING).of_arguments(self)

    @property
    def place_model_on_device(self) -> bool | None:
        """None: the Trainer decides. A subclass may override it."""
        return None

    def get_process_log_level(self) -> int:
        """The logging level of this process; by default the script's on the main process, WARNING on others."""
        if self.should_log:
            return log_levels.get(self.log_level, script_verbosity())
        return log_levels.get(self.log_level_replica, logging.WARNING)

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Context: run the block on the main process first, then on the others.

        Args:
            local: the first process of each machine goes first; otherwise only the first of all.
            desc: names the work in error messages.
        """
        return main_process_first(self._world, local, desc, self.ddp_timeout_delta)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the updates of warm-up in a run of `num_training_steps` updates. A run calls it: a subclass may count
        otherwise.
        """
        warmup = self.warmup_steps
        return int(warmup) if warmup >= 1 else math.ceil(num_training_steps * warmup)

    # --- as plain data ---

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, with `<NAME>` for secrets; `cls(**args.to_dict())` makes equal arguments."""
        fields = dataclasses.fields(self)
        return {f.name: as_plain(getattr(self, f.name), f.name) for f in fields if f.init}

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All fields as numbers, bools and text, for trackers."""
        values = {
            **self.to_dict(),
            "train_batch_size": self.train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        return {k: v if type(v) in (bool, int, float, str) else str(v) for k, v in values.items()}


# Arguments that may differ from those of an earlier process without a warning.
FREE_TO_DIFFER = frozenset(
    {
        "output_dir",
        "resume_from_checkpoint",
        "disable_tqdm",
        "log_level",
        "log_level_replica",
        "push_to_hub",
        "hub_model_id",
        "hub_token",
        "hub_private_repo",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "hub_wait",
    }
)


def placeholder(name: str) -> str:
    """What replaces the secret `name` in written arguments."""
    return f"<{name.upper()}>"


def as_plain(value: Any, name: str = "") -> Any:
    """`value` of the field `name` as JSON and YAML have it; a secret as its placeholder."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Enum):  # one of text, too
        return value.value
    if isinstance(value, str):
        return placeholder(name) if is_secret_name(name) else redact_text(value)
    if isinstance(value, PurePath):
        return redact_text(str(value))
    if isinstance(value, (list, tuple)):
        return [as_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {str(key): as_plain(item, str(key)) for key, item in value.items()}
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return as_plain(value.to_dict())
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value


@described()
@dataclass(repr=False)
class TrainingArguments(Helpers, Setters, metaclass=AcceptsOldNames):
    """The settings of a run. Scripts may subclass it as a dataclass.

    Names of earlier versions (`evaluation_strategy`, `warmup_ratio`, ...) are accepted with one warning each, also when
    read or assigned later.

    Raises:
        ConfigError: everything that is wrong, at once: unknown names (with the nearest known one), wrong types, values
            out of range, contradictions, and features that are not built.
    """

    # Fields that may be given as JSON text. Subclasses of scripts add their own to it.
    _VALID_DICT_FIELDS: ClassVar[list[str]]

    def __post_init__(self) -> None:
        check(self)
        self.__dict__["_dividing"] = self._divide_new_models()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_base" in state:
            self.__dict__.update(state)
            return
        # Pickled by transformers, under whose name `windlass run` answers with this class: its values are arguments.
        given = {name: state[name] for name in self.__dataclass_fields__ if name in state}
        self.__dict__.update(vars(type(self)(**given)))

    def _assign(self, name: str, value: Any) -> None:
        if name in OLD_NAMES and name not in self.__dataclass_fields__:
            self._assign_old(name, value)
            return
        if name == "output_dir":
            self.__dict__["_base"] = working_folder()
        derived = self.__dict__.get("_derived")
        if derived is not None:
            # After construction: an assigned value is given, no longer derived, and both names of a choice stay equal.
            self.__dict__["_given"] = {**self.__dict__.get("_given", {}), name: None}
            if name in derived:  # a new dict, because a shallow copy of the arguments shares the old one
                self.__dict__["_derived"] = {n: said for n, said in derived.items() if n != name}
            if name in (sources := self.__dict__.get("_sources", {})):
                self.__dict__["_sources"] = {n: place for n, place in sources.items() if n != name}
            if name in BOTH_WAYS:
                object.__setattr__(self, BOTH_WAYS[name], value)
        object.__setattr__(self, name, value)

    def _read_old(self, name: str) -> Any:
        # Only called for names that are not attributes: an old name reads the field that replaced it.
        old = OLD_NAMES.get(name)
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if old.new is None:
            return self.__dict__.get("_old", {}).get(name, old.default)
        return old.back(getattr(self, old.new))

    if not TYPE_CHECKING:  # type checkers would take every misspelled name for an attribute
        __setattr__ = _assign
        __getattr__ = _read_old

    def is_given(self, name: str) -> bool:
        """Return True if `name` was given to the constructor, or assigned later, with whatever value. False in a copy
        made of all values, which does not show what was requested.
        """
        return name in self.__dict__.get("_given", ())

    def group_options(self) -> dict[str, dict[str, Any]]:
        """The pattern of names of parameters -> the options of their group in the optimizer."""
        return {
            pattern: {
                key: type(value)(as_declared(part, (float,)) for part in value)
                if isinstance(value, list | tuple)
                else as_declared(value, (float, bool))
                for key, value in options.items()
            }
            for pattern, options in mapping(self.optim_groups).items()
        }

    def _assign_old(self, name: str, value: Any) -> None:
        old = OLD_NAMES[name]
        refuse(translate({name: value})[1])
        value = old.read(value)
        if old.new is None or value is None:
            self.__dict__["_old"] = {**self.__dict__.get("_old", {}), name: value}
            return
        ends = old.says_nothing(value)
        if ends and old.back(getattr(self, old.new)) == value:
            return  # what it would end was not requested: the field may have been set under its new name
        if ends and isinstance(value, bool):
            before, default = getattr(self, old.new), default_of(self.__dataclass_fields__[old.new])
            # Of a list, the words that the old name requested: others were set under the new name.
            kept = [word for word in before if not old.back([word])] if isinstance(before, list) else default
            setattr(self, old.new, kept)
            return
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        setattr(self, old.new, old.carry(value, fields))

    def __repr__(self) -> str:
        """The arguments that differ from their defaults; `str(args)` lists all."""
        given = ", ".join(f"{name}={value!r}" for name, value, default in describe(self) if not default)
        return f"{type(self).__name__}({given})"

    def __str__(self) -> str:
        lines = "".join(f"  {name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"


TrainingArguments._VALID_DICT_FIELDS = [
    name for name, rule in rules_of(TrainingArguments).items() if rule.document
]


def describe(args: TrainingArguments) -> list[tuple[str, Any, bool]]:
    """Each argument as (name, value, is default), in the order of the fields; secrets are masked.

    A value that was derived from other arguments counts as default.
    """
    values = args.to_dict()
    plain = _defaults_of(type(args), script_verbosity())
    derived = args.__dict__.get("_derived", {})
    return [(n, v, n in derived or (n in plain and plain[n] == v)) for n, v in values.items()]


def note_sources(
    args: TrainingArguments, sources: Mapping[str, str], others: Mapping[str, tuple[Any, str]] | None = None
) -> None:
    """Record where arguments were set, for `source_of`. One that is assigned later was set by the script.

    Args:
        sources: by name, such as `recipe.yaml:12` or `the command line`.
        others: settings beside the arguments, such as the keys of a recipe: name -> (value, source).
    """
    args.__dict__["_sources"] = {**args.__dict__.get("_sources", {}), **sources}
    args.__dict__["_others"] = {**args.__dict__.get("_others", {}), **(others or {})}


def source_of(args: TrainingArguments, name: str) -> str:
    """Return where an argument that differs from its default was set: the script, unless `note_sources` knows."""
    return str(args.__dict__.get("_sources", {}).get(name, "the script"))


def settings_beside(args: TrainingArguments) -> dict[str, tuple[Any, str]]:
    """Return the settings of `note_sources` that are not arguments: name -> (value, source)."""
    return dict(args.__dict__.get("_others", {}))


def shared_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that must be the same on all ranks. Fields of a script's subclass are not compared."""
    values = args.to_dict()
    rules = rules_of(type(args)).items()
    return {name: values[name] for name, rule in rules if not rule.per_rank and name in values}


@functools.cache  # every run is compared with them, and they are made as slowly as any other arguments
def _defaults_of(cls: type, verbosity: int) -> dict[str, Any]:
    """As `to_dict`, of arguments of the nearest class that can be made without any. `verbosity`: the script's, from
    which `disable_tqdm` follows.
    """
    # Without mixins, which are no arguments.
    kinds = [base for base in cls.__mro__ if issubclass(base, TrainingArguments)]
    plain = next(made for kind in kinds if (made := _made_of_nothing(kind)) is not None)
    return plain.to_dict()


def _made_of_nothing(cls: type[TrainingArguments]) -> TrainingArguments | None:
    """Arguments of this class that are made without any; None if it needs some."""
    try:
        return cls()
    except Exception:  # what a script's own code raises, such as a TypeError of `expanduser(self.output_dir)`
        return None


@contextmanager
def watched(args: TrainingArguments) -> Iterator[None]:
    """Context of a call of a script's loss, which notes divisions by `args.gradient_accumulation_steps`."""
    values = vars(args)  # no property, since subclasses may declare the field again
    number = values["gradient_accumulation_steps"]
    values["gradient_accumulation_steps"] = seen = micro_batch_count(number)
    try:
        yield
    finally:
        if values["gradient_accumulation_steps"] is seen:
            values["gradient_accumulation_steps"] = number
