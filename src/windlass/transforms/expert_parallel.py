"""Expert parallelism: the experts of a mixture are divided among ranks that train on different samples; all else is
replicated (DDP), divided by tensor parallelism, or sharded (FSDP2).
"""

from __future__ import annotations

import torch
from torch import nn

from windlass.config.plan import DistPlan
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded
from windlass.transforms.buffers import broadcast, check_sparse
from windlass.transforms.ddp import DataParallel, leaving_out
from windlass.transforms.expert_layers import divide_experts, expert_parameters, layers_of
from windlass.transforms.first_rank import FirstRank, check_same_structure
from windlass.transforms.held_in_parts import HeldInParts
from windlass.transforms.imagined_replicas import ImaginedReplicas
from windlass.transforms.pipeline import StageCopies
from windlass.transforms.strategy import Strategy


class ReplicatedExperts(HeldInParts, DataParallel):
    """Replicas of all but the experts, which are divided before."""

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang) -> None:
        self._stage_ranks = loss_ranks
        names = {id(p): name for name, p in module.named_parameters()}
        with leaving_out(module, [names[id(p)] for p in expert_parameters(module)]):
            check_sparse(module, loss_ranks)
            super().__init__(module, plan, loss_ranks)


class TrainedExperts(HeldInParts):
    """As `ReplicatedExperts`, of a model in which nothing but the experts is trained: PyTorch's wrapper would have no
    gradient to reduce, and refuses that.
    """

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._stage_ranks = loss_ranks
        check_sparse(module, loss_ranks)
        # As PyTorch's wrapper sends them when it is made.
        whole = (p.detach() for p in module.parameters() if not is_sharded(p))
        broadcast((*whole, *module.buffers()), loss_ranks)
        super().__init__(module, loss_ranks)


class ImaginedExperts(HeldInParts, ImaginedReplicas):
    """As `ReplicatedExperts`, on ranks of which only one exists."""

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang) -> None:
        self._stage_ranks = loss_ranks
        super().__init__(module, plan, loss_ranks, expert_parameters(module))


class StageWithExperts(HeldInParts, StageCopies):
    """Stages of which each loss rank has a copy of all but the experts."""

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._stage_ranks = loss_ranks
        super().__init__(module, loss_ranks)


def replicated(module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> Strategy:
    """Divide the experts of `module`, or of a stage of it, and replicate the rest. Collective.

    Args:
        module: on its device already. All ranks get rank 0's weights and buffers.

    Raises:
        ConfigError: the model has no experts that can be divided so.
    """
    if plan.pipeline is None:  # which has compared the whole model
        check_same_structure(module, loss_ranks)
    if not layers_of(module):
        divide_experts(module, FirstRank(module, device, loss_ranks), loss_ranks, device)
    if plan.pipeline is not None:
        return StageWithExperts(module, loss_ranks)
    if not loss_ranks.exists:
        return ImaginedExperts(module, plan, loss_ranks)
    experts = set(expert_parameters(module))
    if all(p in experts for p in module.parameters() if p.requires_grad):
        return TrainedExperts(module, loss_ranks)
    return ReplicatedExperts(module, plan, loss_ranks)
