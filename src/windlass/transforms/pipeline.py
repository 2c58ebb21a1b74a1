"""Pipelines: the layers of a model are divided among ranks, and micro-batches pass from one to the next (GPipe,
arXiv:1811.06965; one forward, one backward: arXiv:2006.09503).

This is the strategy: who holds which parameter, how gradients are reduced, and what is saved. `engine/pipelined.py`
runs the micro-batches of an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.pipeline_plan import PipelinePlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.module_state import keep_elsewhere, state_of
from windlass.core.trees import send_to_device
from windlass.dist.absent import Absent
from windlass.dist.gang import Gang
from windlass.transforms.averaging import average_gradients
from windlass.transforms.buffers import broadcast, check_sparse
from windlass.transforms.evaluating import evaluating
from windlass.transforms.first_rank import check_same_structure
from windlass.transforms.lean_head import InexactLossError, LeanHead, head_of
from windlass.transforms.pipeline_cut import example_of, find_cut
from windlass.transforms.stage_forwards import output_tensors
from windlass.transforms.staged_model import StagedModel, staged_of
from windlass.transforms.strategy import Strategy, squared_norm


class Pipeline(Strategy):
    """A model whose layers are divided among the ranks of a pipeline. It stays divided after a run, and a module that
    was divided before is not changed.

    Args:
        module: whole, and best on the host still. All ranks get rank 0's weights and buffers. Collective.

    Attributes:
        staged: the stages of this rank.

    Raises:
        ConfigError: the model cannot be cut into so many stages.
        ModelError: the stages compute something else than the whole model.
    """

    sharded = True
    saves_parts = True

    def __init__(self, module: nn.Module, plan: PipelinePlan, loss_ranks: Gang, device: torch.device) -> None:
        self._loss_ranks, self._all_ranks = loss_ranks, loss_ranks.over("all")
        self._ranks, self._device = loss_ranks.over("pipeline"), device
        self.staged = staged_of(module) or self._divided(module, plan)
        super().__init__(module, self._all_ranks.size > 1)

    def _divided(self, module: nn.Module, plan: PipelinePlan) -> StagedModel:
        _refuse_unfit(module)
        check_same_structure(module, self._all_ranks)
        check_sparse(module, self._all_ranks)
        # Usually on the host still: no device need hold all of it.
        on_host = all(tensor.is_cpu for tensor in (*module.parameters(), *module.buffers()))
        group = self._all_ranks.host_group if on_host else self._all_ranks.device_group
        broadcast((tensor.detach() for tensor in (*module.parameters(), *module.buffers())), group)
        placement = plan.placement
        example = example_of(module)
        cut, whole = find_cut(module, len(placement), plan.split_points, example)
        lean_head = _lean_head(module)
        staged = StagedModel(module, cut, placement, self._ranks, self._device)
        staged.lean_head = lean_head
        if example is not None and self._ranks.exists:
            args, kwargs = send_to_device(example, self._device)
            with evaluating(module):
                self._refuse_difference(type(module).__name__, whole, module(*args, **kwargs))
        keep_elsewhere(module, staged)
        return staged

    def _refuse_difference(self, name: str, whole: Any, staged: Any) -> None:
        """Raise ModelError on all ranks if the result differs: else others would wait."""
        expected, found = output_tensors(whole), output_tensors(staged)
        wrong = [] if expected.keys() == found.keys() else [f"the outputs {', '.join(map(str, expected))}"]
        for key in sorted(expected.keys() & found.keys(), key=str):
            one, other = expected[key].to(self._device), found[key]
            if not torch.allclose(
                one, other, rtol=64 * torch.finfo(one.dtype).eps, atol=1e-6 * float(one.abs().max())
            ):
                wrong.append(f"{key} by {float((one - other).abs().max()):.2g}")
        for reasons in self._all_ranks.gather_objects(wrong):
            if reasons:
                raise ModelError(
                    f"{name} computes something else when it is cut into stages; different: {', '.join(reasons)}. "
                    "Its layers pass more than one tensor on; set pp_size=1, or cut it elsewhere by pp_split_points"
                )

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Sum the gradients of tied parameters over their two stages, and average all over the ranks of the same stage.

        The first of two stages averages for both, so that they cannot come to differ by rounding.
        """
        self._send_ties(self.staged.copies, self.staged.lent, add=True)
        trained = [p for p in self._module.parameters() if p.requires_grad and not isinstance(p, Absent)]
        if self._loss_ranks.size > 1:
            own = [p for p in trained if p not in self.staged.copies]
            average_gradients(own, self._loss_ranks.sum_on_device, self._loss_ranks.size)
        self._send_ties(self.staged.lent, self.staged.copies, add=False)

    def _send_ties(
        self, sent: Mapping[nn.Parameter, int], received: Mapping[nn.Parameter, int], add: bool
    ) -> None:
        link = self.staged.link
        for parameter, to in sent.items():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                link.run(link.sending(gradient.contiguous(), to))
        for parameter, source in received.items():
            if parameter.requires_grad:
                room = torch.empty_like(parameter, memory_format=torch.contiguous_format)
                link.run(link.receiving(room, source))
                parameter.grad = room if parameter.grad is None or not add else parameter.grad + room

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Each parameter counts once, also a tied one."""
        again = {id(p.grad) for p in self.staged.copies}
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            if id(gradient) not in again:
                square += squared_norm(gradient).double()
        return self.norm_of(square).to(gradients[0].dtype if gradients else square.dtype)

    def square(self, gradient: Tensor) -> Tensor:
        again = any(p.grad is gradient for p in self.staged.copies)
        return squared_norm(gradient) * (not again)

    def norm_of(self, square: Tensor) -> Tensor:
        return self._ranks.sum_on_device(square).sqrt()

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        return self._all_ranks.max_on_device(flag)

    # --- the state --------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """Gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        is_first, whole = self._all_ranks.world.is_main, dict[int, Tensor]()
        for parameter, value in self.staged.whole_parameters():
            if is_first:
                whole[id(parameter)] = value.cpu() if isinstance(parameter, Absent) else parameter.detach()
        if not is_first:
            return {}
        named = dict(self._module.named_parameters(remove_duplicate=False))
        return {
            name: whole[id(named[name])] if name in named else value
            for name, value in state_of(self._module).items()
        }

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Forwards inside run on each rank by itself. Changes to parameters are lost."""
        with self.staged.whole():
            yield

    def generating(self) -> AbstractContextManager[Any]:
        """Whole parameters on every rank: each generates by itself."""
        return self.gathered()

    def cast(self, dtype: torch.dtype, device: torch.device) -> None:
        fix = "is not built for pipelines: evaluate with bf16=True, or after training on one process"
        raise ConfigError(Problem("bf16_full_eval", str(dtype), fix))


def _lean_head(module: nn.Module) -> LeanHead | None:
    """What makes the loss of the whole model without logits; None if only its own loss is exact, or it has no head."""
    getter = getattr(module, "get_output_embeddings", None)
    if not callable(getter) or head_of(module) is None:
        return None
    try:
        return LeanHead.measured(module, module)
    except InexactLossError:
        return None


def _refuse_unfit(module: nn.Module) -> None:
    if hasattr(module, "peft_config"):
        fix = "an adapter is not divided among the stages of a pipeline: train the whole model, or set pp_size=1"
        raise ConfigError(Problem("peft_config", type(module).__name__, fix))
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        fix = "has an encoder and a decoder, which are not cut into stages; set pp_size=1"
        raise ConfigError(Problem("model", type(module).__name__, fix))
