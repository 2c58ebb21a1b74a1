"""A stage of a pipeline as the schedules of `torch.distributed.pipelining` drive it.

It has the methods of PyTorch's own `PipelineStage`, which infers one shape for all micro-batches and runs a module.
Here each activation has its own shape, and the stage runs a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from windlass.core.tensors import laid_out_as
from windlass.dist.sharded import is_sharded
from windlass.transforms.staged_model import StagedModel


class PipelineStage:
    """One stage of this rank.

    Attributes:
        body: runs the training step of a micro-batch, by its index; on the last stage it returns the loss.
        is_first, is_last, stage_index, num_stages, group_rank, group_size, stage_index_to_group_rank, device, submod,
            has_backward, output_chunks, args_recv_info, act_send_info: what schedules read or set.
    """

    body: Callable[[int], Tensor]

    def __init__(self, staged: StagedModel, stage: int) -> None:
        self._staged, self._link = staged, staged.link
        self.stage_index, self.num_stages = stage, staged.stages
        self.group_rank, self.group_size = staged.link.ranks.rank, staged.link.ranks.size
        self.stage_index_to_group_rank = dict(enumerate(staged.placement))
        self.device, self.submod, self.has_backward = staged.link.device, nn.Identity(), True
        self.output_chunks: list[Any] = [()]  # torch 2.9 joins outputs of which none were asked for
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self._received: dict[int, Tensor] = {}
        self._forwarded: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._input_gradients: dict[int, Tensor] = {}
        self._weight_work: dict[int, Callable[[], object]] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def clear_runtime_states(self) -> None:
        """Forget what an update that failed left."""
        self._link.settle()
        self._received, self._forwarded, self._gradients = {}, {}, {}
        self._input_gradients, self._weight_work = {}, {}

    # --- set-up: nothing is inferred --------------------------------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing to do: losses are shares of the update's."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing to do: the strategy reduces gradients after the schedule."""

    # --- forward ----------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what this stage begins with."""
        if self.is_first:
            return []
        source, room = self._staged.placement[self.stage_index - 1], self._staged.room(self.stage_index)
        assert room is not None, "a training step that fails announces nothing"
        self._received[fwd_chunk_id] = room
        return [self._link.receiving(room, source)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take it from the stage before, which is on this rank."""
        self._received[mb_index] = prev_stage_outputs.detach()

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensor:
        """Run the stage on a micro-batch."""
        # A leaf of the graph, whose gradient goes to the stage before.
        received = None if self.is_first else self._received.pop(fwd_chunk_id).requires_grad_()
        output = self._staged.run(self.stage_index, fwd_chunk_id, received, lambda: self.body(fwd_chunk_id))
        self._forwarded[fwd_chunk_id] = output, received
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what this stage ends with."""
        if self.is_last:
            return []
        tensor = self._forwarded[fwd_chunk_id][0].detach().contiguous()
        to = self._staged.placement[self.stage_index + 1]
        self._link.announce(tensor, to)
        return [self._link.sending(tensor, to)]

    # --- backward ---------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradient of what this stage ended with."""
        if self.is_last:
            return []
        output = self._forwarded[bwd_chunk_id][0]
        room = torch.empty_like(output, memory_format=torch.contiguous_format).detach()
        self._gradients[bwd_chunk_id] = room
        return [self._link.receiving(room, self._staged.placement[self.stage_index + 1])]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take it from the next stage, which is on this rank."""
        [self._gradients[mb_index]] = next_stage_bwd_outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the gradients of a micro-batch: of parameters and input, or of the input alone."""
        output, received = self._forwarded.pop(bwd_chunk_id)
        gradient = None if self.is_last else self._gradients.pop(bwd_chunk_id)
        if not output.requires_grad:
            self._weight_work[bwd_chunk_id] = lambda: None  # no parameter is trained up to here
        elif full_backward:
            torch.autograd.backward(output, gradient)
        elif received is None:
            self._weight_work[bwd_chunk_id] = lambda: torch.autograd.backward(output, gradient)
        else:
            own = [p for p in self._staged.parameters_of(self.stage_index) if p.requires_grad]
            given = None if gradient is None else [gradient]
            _, groups = stage_backward_input([output], given, [received], iter(own))
            self._weight_work[bwd_chunk_id] = lambda: stage_backward_weight(iter(own), groups)
        if received is not None:
            # The stage before waits for a gradient, even if nothing here depends on what it sent.
            found = received.grad
            self._input_gradients[bwd_chunk_id] = torch.zeros_like(received) if found is None else found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of parameters that were left."""
        self._weight_work.pop(bwd_chunk_id)()
        for parameter in self._staged.parameters_of(self.stage_index):
            # PyTorch's schedules set the gradient as the operators return it, and autograd in the parameter's strides.
            if parameter.grad is not None and not is_sharded(parameter):
                parameter.grad = laid_out_as(parameter.grad, parameter)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor]:
        """The gradient for the stage before, which is on this rank."""
        return (self._input_gradients.pop(mb_index),)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of what this stage began with."""
        if self.is_first:
            return []
        gradient = self._input_gradients.pop(bwd_chunk_id).contiguous()
        return [self._link.sending(gradient, self._staged.placement[self.stage_index - 1])]
