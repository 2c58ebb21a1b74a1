"""Expert parallelism: the experts of a mixture are divided among ranks that train on different samples; all else is
replicated (DDP) or sharded (FSDP2) over all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import DistPlan
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded, locals_of
from windlass.transforms.buffers import check_sparse
from windlass.transforms.ddp import DataParallel, leaving_out
from windlass.transforms.expert_layers import divide_experts, expert_parameters, gathered, layers_of
from windlass.transforms.first_rank import FirstRank, check_same_structure
from windlass.transforms.fsdp import FullyShardedModel
from windlass.transforms.imagined_replicas import ImaginedReplicas
from windlass.transforms.strategy import Strategy, device_of, squared_norm, whole_on_main
from windlass.transforms.whole_balance import WholeBalance


class _WithExperts(Strategy):
    """A mixture whose experts are divided; of the rest each rank has a copy. Experts stay divided after a run, and
    a module in which they are is not changed.
    """

    sharded = True
    saves_parts = True

    def _divide(self, module: nn.Module, loss_ranks: Gang, device: torch.device) -> None:
        check_same_structure(module, loss_ranks)
        if not layers_of(module):
            divide_experts(module, FirstRank(module, device, loss_ranks), loss_ranks, device)
        self._loss_ranks, self._expert_ranks = loss_ranks, loss_ranks.over("expert")

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Count every element once: all ranks have the gradients of the rest."""
        square = torch.zeros(2, dtype=torch.float64, device=device_of(self._module))
        for gradient, mine in zip(gradients, locals_of(gradients), strict=True):
            square[int(is_sharded(gradient))] += squared_norm(mine).double()
        total = square[0] + self._expert_ranks.sum_on_device(square[1])
        return total.sqrt().to(gradients[0].dtype if gradients else total.dtype)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return locals_of(gradients)

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        return self._loss_ranks.max_on_device(flag)

    def gathered(self) -> AbstractContextManager[None]:
        """Forwards inside do not communicate. Changes to experts are lost."""
        return gathered(self._module)

    def generating(self) -> AbstractContextManager[None]:
        """Ranks generate different numbers of tokens: all of them have all experts."""
        return self.gathered()

    def whole_state(self) -> dict[str, Any]:
        """Experts are gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        return whole_on_main(self._module, self._loss_ranks.world.is_main)


class ReplicatedExperts(_WithExperts, DataParallel):
    """Replicas of all but the experts.

    Args:
        module: on its device already. All ranks get rank 0's weights and buffers. Collective.

    Raises:
        ConfigError: the model has no experts that can be divided so.
    """

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> None:
        self._divide(module, loss_ranks, device)
        names = {id(p): name for name, p in module.named_parameters()}
        with leaving_out(module, [names[id(p)] for p in expert_parameters(module)]):
            check_sparse(module, loss_ranks)
            super().__init__(module, plan, loss_ranks)


class ImaginedExperts(_WithExperts, ImaginedReplicas):
    """As `ReplicatedExperts`, on ranks of which only one exists."""

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> None:
        self._divide(module, loss_ranks, device)
        super().__init__(module, plan, loss_ranks, expert_parameters(module))


class ShardedExperts(FullyShardedModel):
    """A mixture whose experts are divided; the rest is sharded. Experts are not sharded further: the ranks of the other
    expert gangs hold copies of them.
    """

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with super().gathered(), gathered(self._module):
            yield


def divided(
    module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device
) -> ReplicatedExperts | ImaginedExperts | ShardedExperts:
    """Divide the experts of `module`, and replicate or shard the rest; their balancing loss is that of all ranks.
    Collective.
    """
    replicated = ReplicatedExperts if loss_ranks.exists else ImaginedExperts
    strategy = (ShardedExperts if plan.strategy == "fsdp" else replicated)(module, plan, loss_ranks, device)
    try:
        balanced = WholeBalance(module, loss_ranks, lambda: strategy.filling)
    except BaseException:
        strategy.release()
        raise
    strategy.at_release.append(balanced.release)
    return strategy
