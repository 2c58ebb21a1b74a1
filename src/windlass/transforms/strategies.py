"""The registry of strategies: a plan's name for one, and the file that implements it."""

from __future__ import annotations

from torch import nn

from windlass.config.plan import DistPlan
from windlass.dist.gang import Gang
from windlass.transforms.alone import Alone
from windlass.transforms.strategy import Strategy


def spread(module: nn.Module, plan: DistPlan, gang: Gang) -> Strategy:
    """Spread `module`, on its device already, over the ranks of `gang` as the plan says. Collective.

    Raises:
        ConfigError: the plan asks for what this module or world cannot do.
    """
    if plan.strategy == "fsdp":
        from windlass.transforms.fsdp import FullyShardedModel

        return FullyShardedModel(module, plan, gang)
    if gang.size == 1:
        return Alone(module)
    from windlass.transforms.ddp import DataParallel

    return DataParallel(module, plan)
