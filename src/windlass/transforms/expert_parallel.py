"""Expert parallelism: the experts of a mixture are divided among ranks that train on different samples; all else is
replicated (DDP), divided by tensor parallelism, or sharded (FSDP2).
"""

from __future__ import annotations

import torch
from torch import nn

from windlass.config.plan import DistPlan
from windlass.dist.gang import Gang
from windlass.transforms.buffers import check_sparse
from windlass.transforms.ddp import DataParallel, leaving_out
from windlass.transforms.expert_layers import divide_experts, expert_parameters, layers_of
from windlass.transforms.first_rank import FirstRank, check_same_structure
from windlass.transforms.fsdp import FullyShardedModel
from windlass.transforms.held_in_parts import HeldInParts
from windlass.transforms.imagined_replicas import ImaginedReplicas
from windlass.transforms.strategy import Strategy
from windlass.transforms.tensor_parallel import TensorParallel
from windlass.transforms.whole_balance import WholeBalance


class _WithExperts(HeldInParts):
    """A mixture whose experts are divided; of the rest each rank has a copy."""

    def _divide(self, module: nn.Module, loss_ranks: Gang, device: torch.device) -> None:
        check_same_structure(module, loss_ranks)
        if not layers_of(module):
            divide_experts(module, FirstRank(module, device, loss_ranks), loss_ranks, device)
        self._stage_ranks = loss_ranks


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


def divided(module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> Strategy:
    """Divide the experts of `module`, and replicate, divide or shard the rest; their balancing loss is that of all
    ranks. Experts are not sharded further: the ranks of the other expert gangs hold copies of them. Collective.
    """
    strategy = _spread(module, plan, loss_ranks, device)
    try:
        balanced = WholeBalance(module, loss_ranks, lambda: strategy.filling)
    except BaseException:
        strategy.release()
        raise
    strategy.at_release.append(balanced.release)
    return strategy


def _spread(module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> Strategy:
    if plan.strategy == "fsdp":
        return FullyShardedModel(module, plan, loss_ranks, device)
    if plan.tensor > 1:
        return TensorParallel(module, loss_ranks, device)
    replicated = ReplicatedExperts if loss_ranks.exists else ImaginedExperts
    return replicated(module, plan, loss_ranks, device)
