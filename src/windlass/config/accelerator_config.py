"""The loader options that scripts pass as `accelerator_config`: read from any form, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config.nearest import did_you_mean
from windlass.config.plugin_base import count_problems
from windlass.config.plugins import GradientAccumulationPlugin
from windlass.config.support_rows import ACCELERATOR_REFUSED
from windlass.core.errors import ConfigError, Problem

ACCUMULATION_OPTIONS = tuple(field.name for field in dataclasses.fields(GradientAccumulationPlugin))


@dataclass
class AcceleratorConfig:
    """How batches reach the processes. What Windlass always does is accepted; what it never does is refused.

    Attributes:
        split_batches: per-device batch sizes mean the whole batch of all processes (refused).
        dispatch_batches: the main process reads for all (refused); None and False: each process reads its own share.
        even_batches: pad the last batch by repeating samples; never done, so both values mean the same.
        use_seedable_sampler: the order of samples follows from the seed; always so.
        non_blocking: copy batches to the device without waiting; always so from pinned memory.
        gradient_accumulation_kwargs: `num_steps` stands in for gradient_accumulation_steps=1.
        use_configured_state: take an accelerator state made before (refused).
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def num_steps(self) -> int | None:
        return (self.gradient_accumulation_kwargs or {}).get("num_steps")


def read(value: Any) -> AcceleratorConfig:
    """An `AcceleratorConfig` from None, a dict or part of one, or any dataclass with the same fields.

    Raises:
        ConfigError: an unknown key, or a class where an instance is meant.
    """
    if value is None:
        return AcceleratorConfig()
    if isinstance(value, AcceleratorConfig):
        return value
    if isinstance(value, type):
        raise ConfigError(Problem("accelerator_config", value, "is a class; give an instance of it"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if not isinstance(value, dict):
        raise ConfigError(
            Problem("accelerator_config", value, "must be a dict, JSON, a JSON file or a dataclass")
        )
    known = [f.name for f in dataclasses.fields(AcceleratorConfig)]
    unknown = [
        Problem(f"accelerator_config.{key}", item, f"there is no such option{did_you_mean(str(key), known)}")
        for key, item in value.items()
        if key not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return AcceleratorConfig(**value)


def objections(config: AcceleratorConfig, accumulation: int) -> Iterator[Problem]:
    """What of `config` cannot be honoured, or contradicts `gradient_accumulation_steps`."""
    for name, reason in ACCELERATOR_REFUSED.items():
        if getattr(config, name):
            yield Problem(f"accelerator_config.{name}", True, reason)
    yield from _accumulation(config, accumulation)


def _accumulation(config: AcceleratorConfig, accumulation: int) -> Iterator[Problem]:
    options = config.gradient_accumulation_kwargs or {}
    where = "accelerator_config.gradient_accumulation_kwargs"
    for key in options:
        if key not in ACCUMULATION_OPTIONS:
            hint = did_you_mean(str(key), ACCUMULATION_OPTIONS)
            yield Problem(f"{where}.{key}", options[key], f"there is no such option{hint}")
    if options.get("sync_each_batch"):
        yield Problem(f"{where}.sync_each_batch", True, "is not built: gradients are reduced once per update")
    if options.get("sync_with_dataloader") is False:
        yield Problem(
            f"{where}.sync_with_dataloader", False, "is not built: an epoch always ends with an update"
        )
    steps = config.num_steps
    wrong = list(count_problems(GradientAccumulationPlugin(steps), ("num_steps",)))
    yield from (Problem(f"{where}.num_steps", steps, problem.fix) for problem in wrong)
    if steps is not None and not wrong and steps != accumulation:
        fix = f"contradicts gradient_accumulation_steps={accumulation}; give one of the two"
        yield Problem(f"{where}.num_steps", steps, fix)
