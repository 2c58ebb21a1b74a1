"""`TrainingArguments`: everything a script sets about a run, as one object of plain data.

It makes no folder, touches no device and writes no environment. It stays assignable, because scripts assign to it;
each `train()` and `evaluate()` checks it again as a whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from windlass.config.accepting import AcceptsOldNames
from windlass.config.helpers import SerialHelpers, WorldHelpers
from windlass.config.renamed import BOTH_WAYS, OLD_NAMES, announce, translate
from windlass.config.sections import (
    compute,
    evaluation,
    optimisation,
    reporting,
    running,
    saving,
)
from windlass.config.setters import Setters
from windlass.config.validate import check
from windlass.core.errors import ConfigError
from windlass.core.locations import working_folder


@dataclass(repr=False)
class TrainingArguments(
    # A dataclass takes the fields of its last base first, so the sections stand in reverse: `output_dir` is last.
    running.WindlassSection,
    running.ProcessSection,
    saving.ResumeFromSection,
    running.ScriptSection,
    running.DebugSection,
    running.ShardingSection,
    running.DistributedSection,
    running.DataSection,
    running.HardwareSection,
    running.SeedSection,
    saving.ResumeSection,
    saving.BestSection,
    saving.HubSection,
    saving.SaveSection,
    evaluation.EvaluationSection,
    reporting.TrackingSection,
    reporting.LoggingSection,
    compute.MemorySection,
    compute.KernelSection,
    compute.CompileSection,
    compute.RecomputeSection,
    compute.PrecisionSection,
    optimisation.StabilitySection,
    optimisation.OptimizerSection,
    optimisation.ScheduleSection,
    optimisation.DurationSection,
    Setters,
    SerialHelpers,
    WorldHelpers,
    metaclass=AcceptsOldNames,
):
    """The settings of a run; `docs/support.md` lists each name. Scripts may subclass it as a dataclass.

    Names of earlier versions (`evaluation_strategy`, `warmup_ratio`, ...) are accepted with one warning each, also when
    read or assigned later.

    Raises:
        ConfigError: everything that is wrong, at once: unknown names (with the nearest known one), wrong types, values
            out of range, contradictions, and features that are not built.
    """

    def __post_init__(self) -> None:
        check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OLD_NAMES and name not in self.__dataclass_fields__:
            self._assign_old(name, value)
            return
        if name == "output_dir":
            self.__dict__["_base"] = working_folder()
        derived = self.__dict__.get("_derived")
        if derived is not None:
            # After construction: what is assigned is no longer derived, and twins stay equal.
            if name in derived:  # a new dict, because a shallow copy of the arguments shares the old one
                self.__dict__["_derived"] = {n: said for n, said in derived.items() if n != name}
            if name in BOTH_WAYS:
                object.__setattr__(self, BOTH_WAYS[name], value)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Only reached by names that are no attributes: old ones are read through the field they became.
        old = OLD_NAMES.get(name)
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if old.new is None:
            return self.__dict__.get("_old", {}).get(name, old.default)
        return old.back(getattr(self, old.new))

    def _assign_old(self, name: str, value: Any) -> None:
        old = OLD_NAMES[name]
        if old.new is None or old.says_nothing(value):
            _, problems = translate({name: value})
            if problems:
                raise ConfigError(problems)
            self.__dict__["_old"] = {**self.__dict__.get("_old", {}), name: value}
            if old.new is not None and type(old.default) is type(value) is bool:
                self._switch_off(old.new)
            return
        announce(name)
        setattr(
            self, old.new, old.carry(value, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        )

    def _switch_off(self, name: str) -> None:
        """An old switch assigned False: its field goes back to its default."""
        field = self.__dataclass_fields__[name]
        made = field.default_factory
        setattr(self, name, made() if made is not dataclasses.MISSING else field.default)

    def __str__(self) -> str:
        lines = "".join(f"  {name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def describe(args: TrainingArguments) -> list[tuple[str, Any, bool]]:
    """Every argument as (name, value, is default), in the order of the fields; secrets are masked.

    What was derived from other arguments counts as default.
    """
    values = args.to_dict()
    plain = type(args)().to_dict() if _needs_nothing(type(args)) else {}
    derived = args.__dict__.get("_derived", {})
    return [(n, v, n in derived or (n in plain and plain[n] == v)) for n, v in values.items()]


def _needs_nothing(cls: type) -> bool:
    missing = dataclasses.MISSING
    return all(
        f.default is not missing or f.default_factory is not missing
        for f in dataclasses.fields(cls)
        if f.init
    )
