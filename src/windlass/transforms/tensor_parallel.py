"""Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv:1909.08053): each rank has some columns or rows of the
weights that a plan names, and computes with them.

A column-wise layer computes a part of its outputs; a row-wise one takes that part, and the results are summed. All else
is whole on every rank, and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.core.errors import ConfigError, Problem
from windlass.dist.device_mesh import tensor_device_mesh
from windlass.dist.gang import Gang
from windlass.dist.sharded import Absent, is_sharded, present
from windlass.transforms.averaging import AfterBackward, average_gradients
from windlass.transforms.buffers import broadcast, check_sparse
from windlass.transforms.expert_layers import divide_experts, expert_parameters, layers_of
from windlass.transforms.expert_plan import chosen_experts
from windlass.transforms.first_rank import FirstRank, check_same_structure
from windlass.transforms.held_in_parts import HeldInParts
from windlass.transforms.split_loss import split_loss
from windlass.transforms.tensor_layers import divide, is_divided
from windlass.transforms.tensor_plan import EXPERTS, chosen_layers
from windlass.transforms.tensor_sequence import FIELD, divide_positions, divides_positions


class TensorDivision:
    """The division of the layers of a module among the ranks of a tensor gang.

    Args:
        module: whole, or divided before: it is not changed then.
        device: for training.
        positions: between its divided layers each rank computes some of the positions; see `tensor_sequence.py`.

    Raises:
        ConfigError: the plan of the model names nothing, or sizes cannot be divided.
    """

    def __init__(
        self, module: nn.Module, tensor_ranks: Gang, device: torch.device, positions: bool = False
    ) -> None:
        self._module, self._ranks = module, tensor_ranks
        self.chosen = {} if is_divided(module) else chosen_layers(module, tensor_ranks.size)
        if self.chosen and tensor_ranks.mesh.expert > 1:
            self._choose_experts()
        self._parts = None
        if self.chosen and positions:
            self._parts = divide_positions(module, self.chosen, tensor_ranks, device)
        elif divides_positions(module) != positions:
            fix = "this model was divided with another value and stays so; build it again"
            raise ConfigError(Problem(FIELD, positions, fix))

    def _choose_experts(self) -> None:
        """Divide the experts that expert ranks divide, also where the plan leaves them whole."""
        known = {id(layer) for layer, _ in self.chosen.values()}
        experts = self._ranks.mesh.expert
        for path, (layer, _) in chosen_experts(self._module, experts, self._ranks.size).items():
            if id(layer) not in known:
                self.chosen[path] = layer, EXPERTS

    def apply(self, within: nn.Module, mesh: DeviceMesh) -> None:
        """Divide those of the layers that are part of `within`, whole, and on this rank. See `divide`."""
        parts = {id(part) for part in within.modules()}
        own = {
            path: (layer, style)
            for path, (layer, style) in self.chosen.items()
            # Units lie within each other, so that the layers of an inner one are divided by now.
            if id(layer) in parts
            and not hasattr(layer, "tensor_style")
            and not any(isinstance(p, Absent) for p in layer.parameters())
        }
        divide(own, mesh, self._ranks)

    def finish(self, unit_dtype: torch.dtype | None) -> None:
        """Called after all layers were divided, when forwards can be made. Collective. `unit_dtype`: see `Strategy`."""
        # One rank of a pipeline cannot compare the losses of a whole model.
        if self.chosen and self._ranks.mesh.pipeline == 1:
            if self._parts is not None and self._ranks.exists:
                self._parts.check(self._module, unit_dtype)
            split_loss(self._module)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that can have a gradient, now or once they are no longer frozen."""
        return [p for p in present(self._module.parameters()) if p.is_floating_point() or p.is_complex()]

    def average_shared(self, total: Callable[[Tensor], Tensor], ranks: int) -> None:
        """Average the gradients of what is not divided over `ranks`, whose sum `total` makes in place. They are equal
        in a tensor gang, but for rounding, which must not make them differ.
        """
        shared = [p for p in present(self._module.parameters()) if p.requires_grad and not is_cut(p)]
        average_gradients(shared, total, ranks)


def is_cut(tensor: Any) -> bool:
    """Return True if the ranks of a tensor gang have different parts of `tensor`."""
    return is_sharded(tensor) and "tensor" in (tensor.device_mesh.mesh_dim_names or ())


class TensorParallel(HeldInParts):
    """A model whose layers are divided among the ranks of a tensor gang; its experts further among expert ranks.

    Args:
        module: on its device already, or the stage of a pipeline. All ranks of the stage get the weights and buffers
            of its first. Collective.
        positions: see `TensorDivision`.

    Raises:
        ConfigError: the plan of the model names nothing, or sizes cannot be divided.
    """

    def __init__(
        self, module: nn.Module, loss_ranks: Gang, device: torch.device, positions: bool = False
    ) -> None:
        self._loss_ranks, self._tensor_ranks = loss_ranks, loss_ranks.over("tensor")
        self._stage_ranks = loss_ranks.over("stage")
        self._division = TensorDivision(module, self._tensor_ranks, device, positions)
        check_same_structure(module, self._stage_ranks)
        check_sparse(module, self._stage_ranks)
        if loss_ranks.mesh.expert > 1 and not layers_of(module):
            divide_experts(module, FirstRank(module, device, self._stage_ranks), loss_ranks, device)
        whole = (p.detach() for p in present(module.parameters()) if not is_sharded(p))
        # Before layers are divided: the parts of a gang must be of one weight.
        broadcast((*whole, *module.buffers()), self._stage_ranks)
        self._division.apply(module, tensor_device_mesh(loss_ranks.mesh, device))
        super().__init__(module, self._stage_ranks)
        self._division.finish(self.unit_dtype)
        self._after_backward = AfterBackward(self._division.trainable, self.reduce)

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return self._after_backward.held(not last)

    def reduce(self) -> None:
        """Average gradients: those of parts over the loss ranks, the others over all ranks of the stage."""
        if self._loss_ranks.size > 1:
            experts = set(expert_parameters(self.module))  # which their own backward averages
            trained = [p for p in present(self.module.parameters()) if p.requires_grad]
            parts = [p for p in trained if is_cut(p) and p not in experts]
            average_gradients(parts, self._loss_ranks.sum_on_device, self._loss_ranks.size)
        self._division.average_shared(self._stage_ranks.sum_on_device, self._stage_ranks.size)

    def _release(self) -> None:
        self._after_backward.release()
