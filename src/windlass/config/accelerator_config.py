# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""The loader options that scripts pass as `accelerator_config`: read from any form, and checked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config.kinds import document
from windlass.config.loop_options import DataLoaderConfiguration, GradientAccumulationPlugin
from windlass.config.parallel import rows_loop as rows
from windlass.config.parallel.keys import setting_of
from windlass.config.sections.setting import rules_of, setting
from windlass.config.values import wrong_values
from windlass.core.errors import ConfigError, Problem, refuse, unknown
from windlass.core.whole_file import parse_json


@dataclass
class AcceleratorConfig:
    """How batches are distributed. What Windlass always does is accepted."""

    split_batches: bool = setting_of(rows.SPLIT_BATCHES)
    dispatch_batches: bool | None = setting_of(rows.DISPATCH_BATCHES)
    even_batches: bool = setting_of(
        rows.EVEN_BATCHES,
        mapped="is never done: the last batch is distributed as it is, and no sample is repeated",
    )
    use_seedable_sampler: bool = setting_of(
        rows.SEEDABLE_SAMPLER, True, mapped="is always on: the order of samples follows from the seed"
    )
    non_blocking: bool = setting_of(rows.NON_BLOCKING, mapped="is always on from pinned memory")
    gradient_accumulation_kwargs: dict[str, Any] | None = setting(
        None, "Options of accumulation; `num_steps` replaces gradient_accumulation_steps=1."
    )
    use_configured_state: bool = setting(
        False,
        "Use an accelerator state that was made before.",
        mapped="is always so: processes that have met are not introduced again, and need no setting",
    )

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Read the options from a JSON file. Raises ConfigError for an unknown key, ValueError if it has no object."""
        return read(parse_json(Path(json_file).read_bytes()))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def pop(self, key: str, default: Any = None) -> Any:
        """Take an option out of this object, as scripts do before they pass the rest on."""
        return self.__dict__.pop(key, default)

    @property
    def _accumulating(self) -> Mapping[str, Any]:
        """The options of accumulation. Anything but a mapping, which `objections` reports, counts as none."""
        given: Any = self.gradient_accumulation_kwargs
        return given if isinstance(given, Mapping) else {}

    @property
    def num_steps(self) -> int | None:
        return self._accumulating.get("num_steps")

    @property
    def sync_each_batch(self) -> bool:
        """Gradients are reduced after each micro-batch, and not once per update."""
        return bool(self._accumulating.get("sync_each_batch"))

    def accumulation(self, steps: int) -> GradientAccumulationPlugin:
        """The accumulation of a Trainer's accelerator, with `steps` micro-batches in an update."""
        return GradientAccumulationPlugin(**{**self._accumulating, "num_steps": steps})

    def objections(self, accumulation: int) -> Iterator[Problem]:
        """What is wrong, or contradicts `accumulation`, the `gradient_accumulation_steps` of the arguments."""
        for found in wrong_values(self, rules_of(AcceleratorConfig)):
            yield dataclasses.replace(found, field=f"accelerator_config.{found.field}")
        where = "accelerator_config.gradient_accumulation_kwargs"
        names = _names(GradientAccumulationPlugin)
        if strange := unknown(self._accumulating, names, f"{where}.{{}}".format):
            yield from strange
            return
        plugin = GradientAccumulationPlugin(**self._accumulating)
        wrong = list(plugin.objections())
        yield from (Problem(f"{where}.{p.field.partition('.')[2]}", p.value, p.fix) for p in wrong)
        if plugin.num_steps not in (None, accumulation) and not wrong:
            fix = f"contradicts gradient_accumulation_steps={accumulation}; give one of the two"
            yield Problem(f"{where}.num_steps", plugin.num_steps, fix)

    def loader(self, seed: int, data_seed: int | None) -> DataLoaderConfiguration:
        """The options of loaders that a Trainer's accelerator prepares; a run saves their positions.

        Args:
            seed, data_seed: the arguments of the Trainer.
        """
        shared = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
        return DataLoaderConfiguration(
            **{name: getattr(self, name) for name in shared},
            data_seed=seed if data_seed is None and self.use_seedable_sampler else data_seed,
            use_stateful_dataloader=True,
        )

    def batch_size(self, field: str, size: int, ranks: int) -> int:
        """Samples of one process's batch. Raises ConfigError if the processes do not divide it.

        Args:
            field, size: the argument and its value: of each process, or of all `ranks` together if batches are split.
        """
        return share_of_batch(field, size, ranks) if self.split_batches else size


def share_of_batch(field: str, size: int, ranks: int) -> int:
    """Samples of one process, of a batch of `size` that all split. Raises ConfigError if they do not divide it."""
    if size % ranks:
        fix = f"with split_batches=True it is the batch of all processes, and {ranks} do not divide it"
        raise ConfigError(Problem(field, size, fix))
    return size // ranks


def read(value: Any) -> AcceleratorConfig:
    """Return an `AcceleratorConfig` from any form of a dict of some of its fields, or any dataclass with them. Raises
    ConfigError for an unknown key, and ValueError for what is neither.
    """
    if isinstance(value, AcceleratorConfig):
        return value
    if isinstance(value, type):
        raise ValueError("is a class; give an instance of it")
    found: Any = value
    given = dataclasses.asdict(found) if dataclasses.is_dataclass(value) else document(value) or {}
    refuse(unknown(given, _names(AcceleratorConfig), "accelerator_config.{}".format))
    return AcceleratorConfig(**given)


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]
