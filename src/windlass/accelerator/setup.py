"""The settings, device and layout of an accelerator, and the one of its DeepSpeed configurations that it uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.accelerator.loop_settings import LoopSettings
from windlass.config.loop_options import AutocastKwargs
from windlass.config.plan import DistPlan, ZeroPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.outside import find_outside, load_outside
from windlass.dist.gang import Gang
from windlass.precision.dtypes import COMPUTE_DTYPES


class EngineChoice:
    """Owns which of several configurations is selected. The first one is selected until a script selects another.

    Args:
        plans: returns them by name, that of a single one being "".
        compute: "fp32", "bf16" or "fp16".
        selected: the name of one; "" is the first.
    """

    def __init__(self, plans: Callable[[], Mapping[str, ZeroPlan]], compute: str, selected: str = "") -> None:
        self._plans, self._compute, self._selected = plans, compute, selected
        self._divide: Callable[[ZeroPlan | None], Any] = lambda plan: None
        self._dividing: Any = None

    def __reduce__(self) -> Any:
        # A data worker gets the selection without the models that are built here.
        return _chosen, (dict(self._plans()), self._compute, self._selected)

    def divide_new_models(self, divide: Callable[[ZeroPlan | None], Any]) -> None:
        """Call `divide` with the selected configuration now and after each selection, and keep its result alive."""
        self._divide, self._dividing = divide, divide(self.plan)

    @property
    def plan(self) -> ZeroPlan | None:
        """The selected configuration; None without DeepSpeed."""
        plans = self._plans()
        return plans.get(self._selected) or next(iter(plans.values()), None)

    @property
    def plugin(self) -> Any:
        """The selected configuration as a plugin, every field filled in; None without DeepSpeed."""
        plan = self.plan
        return None if plan is None else self._plugin_of(plan)

    @property
    def plugins(self) -> dict[str, Any] | None:
        """All as plugins by name; None if the script named none."""
        named = {name: self._plugin_of(plan) for name, plan in self._plans().items() if name}
        return named or None

    def get(self, name: str) -> Any:
        """The plugin of this name. Raises ConfigError if there is none."""
        return (self.plugins or {})[self._known(name)]

    def select(self, name: str) -> None:
        """Use this one in the next `prepare`. Raises as `get` does."""
        self._selected = self._known(name)
        self._dividing = self._divide(self.plan)

    def _plugin_of(self, plan: ZeroPlan) -> Any:
        return load_outside("plugins of DeepSpeed").plugin_of(plan, self._compute)

    def _known(self, name: str) -> str:
        names = [known for known in self._plans() if known]
        if name not in names:
            fix = f"is not among deepspeed_plugins, which has {', '.join(map(repr, names)) or 'none'}"
            raise ConfigError(Problem("deepspeed_plugin", name, fix))
        return name


def _chosen(plans: Mapping[str, ZeroPlan], compute: str, selected: str) -> EngineChoice:
    return EngineChoice(lambda: plans, compute, selected)


class Setup:
    """The settings, device and layout of one accelerator.

    Args:
        dist: returns how models are spread over processes.

    Attributes:
        engines: the configurations of DeepSpeed.
    """

    def __init__(
        self, settings: LoopSettings, all_ranks: Gang, device: torch.device, dist: Callable[[], DistPlan]
    ) -> None:
        self.settings, self.device, self.all_ranks, self._dist = settings, device, all_ranks, dist
        self.engines = EngineChoice(self._zero_plans, settings.precision.compute)

    def _zero_plans(self) -> dict[str, ZeroPlan]:
        only = self.dist.zero
        return self.settings.engines or ({} if only is None else {"": only})

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        return self._dist()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop; see `Accelerator.autocast`."""
        options = autocast_handler or self.settings.handlers.autocast
        dtype = COMPUTE_DTYPES.get(self.settings.precision.compute)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.dist.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> Any:
        """How models are sharded: the plugin of the script, or one with the same settings; None if not sharded."""
        shard = self.dist.shard if self.is_fsdp2 else None
        if self.settings.fsdp is not None or shard is None:
            return self.settings.fsdp
        known = find_outside("plugins of FSDP")
        return None if known is None else known.fsdp_plugin_of(shard)
