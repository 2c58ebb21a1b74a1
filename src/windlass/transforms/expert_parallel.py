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
from windlass.transforms.held_in_parts import HeldInParts
from windlass.transforms.imagined_replicas import ImaginedReplicas
from windlass.transforms.pipeline import StageCopies


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


class StageWithExperts(HeldInParts, StageCopies):
    """Stages of which each loss rank has a copy of all but the experts."""

    def __init__(self, module: nn.Module, loss_ranks: Gang, device: torch.device) -> None:
        self._stage_ranks = loss_ranks
        if not layers_of(module):
            divide_experts(module, FirstRank(module, device, loss_ranks), loss_ranks, device)
        super().__init__(module, loss_ranks)


def replicated(
    module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device
) -> ReplicatedExperts | ImaginedExperts | StageWithExperts:
    """Divide the experts of `module`, or of a stage of it, and replicate the rest. Collective."""
    if plan.pipeline is not None:
        return StageWithExperts(module, loss_ranks, device)
    return (ReplicatedExperts if loss_ranks.exists else ImaginedExperts)(module, plan, loss_ranks, device)
