"""Pipelines: the layers of a model are divided among ranks, and micro-batches pass from one to the next (GPipe,
arXiv:1811.06965; one forward, one backward: arXiv:2006.09503).

This is the strategy: who holds which parameter, how gradients are reduced, and what is saved. `engine/pipelined.py`
runs the micro-batches of an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import PipelinePlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.module_state import keep_elsewhere, state_of, without_adapters
from windlass.core.trees import send_to_device
from windlass.dist.gang import Gang
from windlass.dist.sharded import Absent, from_part, is_sharded, local, present
from windlass.transforms.averaging import average_gradients
from windlass.transforms.buffers import broadcast, check_sparse
from windlass.transforms.evaluating import evaluating
from windlass.transforms.expert_layers import expert_parameters
from windlass.transforms.first_rank import check_same_structure
from windlass.transforms.lean_head import InexactLossError, LeanHead, head_of
from windlass.transforms.pipeline_cut import example_of, find_cut
from windlass.transforms.stage_balance import StageBalance
from windlass.transforms.stage_forwards import output_tensors
from windlass.transforms.staged_model import StagedModel, staged_of
from windlass.transforms.strategy import Strategy


class StageCopies(Strategy):
    """Stages of which each loss rank has a copy, but for divided experts, which average their gradients themselves."""

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._loss_ranks = loss_ranks
        super().__init__(module)

    def reduce(self) -> None:
        if self._loss_ranks.size > 1:
            experts = set(expert_parameters(self.module))
            trained = [p for p in present(self.module.parameters()) if p.requires_grad and p not in experts]
            average_gradients(trained, self._loss_ranks.sum_on_device, self._loss_ranks.size)


class Pipeline(Strategy):
    """A model whose layers are divided among the ranks of a pipeline. It stays divided after a run, and a module that
    was divided before is not changed. How the layers of a stage are spread over its ranks is a strategy of its own.

    Args:
        module: whole, and best on the host still. All ranks get rank 0's weights and buffers. Collective.
        spread_stage: makes the strategy of a stage, of which each pipeline has one rank; `module` has its layers.
        balances_all: experts are balanced over the batches of all ranks that reduce gradients together.

    Attributes:
        staged: the stages of this rank.

    Raises:
        ConfigError: the model cannot be cut into so many stages, or the layers of one not be divided.
        ModelError: the stages compute something else than the whole model.
    """

    sharded = reduces = saves_parts = True

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        loss_ranks: Gang,
        device: torch.device,
        spread_stage: Callable[[], Strategy],
        balances_all: bool,
    ) -> None:
        self._all_ranks, self._ranks = loss_ranks.over("all"), loss_ranks.over("pipeline")
        self._device = device
        known = staged_of(module)
        if known is None:
            balance = StageBalance(module, loss_ranks, balances_all, lambda: self.filling)
            self._inner = self._divided(module, plan, spread_stage, balance)
        else:
            self._inner = spread_stage()
            self.staged = known
        self.staged.at_end = self._inner.stage_ended
        super().__init__(module, self._all_ranks)

    def _divided(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        spread_stage: Callable[[], Strategy],
        balance: StageBalance,
    ) -> Strategy:
        _refuse_unfit(module, self._all_ranks)
        check_same_structure(module, self._all_ranks)
        check_sparse(module, self._all_ranks)
        # Usually on the host still: no device need hold all of it.
        tensors = (tensor.detach() for tensor in (*module.parameters(), *module.buffers()))
        broadcast(tensors, self._all_ranks)
        placement, example = plan.placement, example_of(module)
        cut, whole = balance.cut(lambda: find_cut(module, len(placement), plan.split_points, example))
        for name in cut.last:
            module.get_submodule(name).ends_stage = True  # type: ignore[assignment]
        # While the model is whole: its own loss is compared with the one made without logits.
        lean_head = lean_head_of_whole(module)
        self.staged = staged = StagedModel(module, cut, placement, self._ranks, self._device, balance)
        staged.lean_head = lean_head
        # Before the layers of a stage are divided, and compute in fewer bits.
        if example is not None and self._ranks.exists:
            args, kwargs = send_to_device(example, self._device)
            with evaluating(module):
                self._refuse_difference(type(module).__name__, whole, module(*args, **kwargs))
        inner = staged.spread(spread_stage)
        if inner.unit_dtype is not None:
            staged.compute_in(inner.unit_dtype)
        keep_elsewhere(module, staged)
        keep_elsewhere(without_adapters(module), staged)
        return inner

    def _refuse_difference(self, name: str, whole: Any, staged: Any) -> None:
        """Raise ModelError on all ranks if the result differs: else others would wait."""
        expected, found = output_tensors(whole), output_tensors(staged)
        wrong = [] if expected.keys() == found.keys() else [f"the outputs {', '.join(map(str, expected))}"]
        for key in sorted(expected.keys() & found.keys(), key=str):
            one, other = expected[key].to(self._device), found[key]
            # Whole numbers, such as the largest of several values, may follow from what was rounded otherwise.
            if not (one.is_floating_point() or one.is_complex()) or not one.numel():
                continue
            rounding = 64 * torch.finfo(one.dtype).eps
            if not torch.allclose(one, other, rtol=rounding, atol=1e-6 * float(one.abs().max())):
                wrong.append(f"{key} by {float((one - other).abs().max()):.2g}")
        for reasons in self._all_ranks.gather_objects(wrong):
            if reasons:
                raise ModelError(
                    f"{name} computes something else when it is cut into stages; different: {', '.join(reasons)}. "
                    "Its layers pass more than one tensor on; set pp_size=1, or cut it elsewhere by pp_split_points"
                )

    # --- gradients --------------------------------------------------------------------------------------------------

    def accumulating(self) -> AbstractContextManager[Any]:
        return self._inner.accumulating()

    def reduce(self) -> None:
        """Reduce gradients over the ranks of each stage, then sum those of tied parameters over their two stages.

        The first of the two adds up for both, so that they cannot come to differ by rounding.
        """
        self._inner.reduce()
        self._send_ties(self.staged.copies, self.staged.lent, add=True)
        self._send_ties(self.staged.lent, self.staged.copies, add=False)

    def _send_ties(
        self, sent: Mapping[nn.Parameter, int], received: Mapping[nn.Parameter, int], add: bool
    ) -> None:
        link = self.staged.link
        operations, rooms = [], dict[nn.Parameter, Tensor]()
        for parameter, to in sent.items():
            if parameter.requires_grad:
                gradient = parameter.grad
                part = torch.zeros_like(local(parameter.detach())) if gradient is None else local(gradient)
                operations.append(link.sending(part.to(self._device).contiguous(), to))
        for parameter, source in received.items():
            if parameter.requires_grad:
                like = local(parameter.detach())
                rooms[parameter] = torch.empty(like.shape, dtype=like.dtype, device=self._device)
                operations.append(link.receiving(rooms[parameter], source))
        # All at once: of stages that are on two ranks in turn each rank may have a copy of the other's, and both would
        # wait in a send for the other to receive.
        link.run(*operations)
        for parameter, room in rooms.items():
            own, found = parameter.grad, room.to(local(parameter.detach()).device)
            parameter.grad = from_part(found if own is None or not add else local(own) + found, parameter)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Each parameter counts once, also a tied one."""
        again = {id(p.grad) for p in self.staged.copies}
        norm = self._inner.total_norm([gradient for gradient in gradients if id(gradient) not in again])
        total = self._ranks.sum_on_device(norm.to(self._device).double().square()).sqrt()
        return total.to(self._norm_dtype)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return self._inner.local(gradients)

    def check_reached(self) -> None:
        self._inner.check_reached()

    def check_used(self) -> None:
        self._inner.check_used()

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        return self._all_ranks.max_on_device(flag)

    # --- the state --------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """Gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        is_first, whole = self._all_ranks.world.is_main, dict[int, Tensor]()
        for parameter, value in self.staged.whole_parameters():
            if is_first:
                here = not isinstance(parameter, Absent) and not is_sharded(parameter)
                whole[id(parameter)] = parameter.detach() if here else value.cpu()
        if not is_first:
            return {}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return {
            name: whole[id(named[name])] if name in named else value
            for name, value in state_of(self.module).items()
        }

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Forwards inside run on each rank by itself. Changes to parameters are lost."""
        with self.staged.whole(), self._inner.gathered():
            yield

    def share_buffers(self) -> None:
        """Send the buffers of each layer from the first rank of its stage to all ranks."""
        for rank, buffers in self.staged.buffers_of_ranks().items():
            source = self._all_ranks.mesh.ranks("stage", self._ranks.members[rank])[0]
            broadcast(buffers, self._all_ranks, source)

    def _release(self) -> None:
        self._inner.release()

    def cast(self, dtype: torch.dtype, device: torch.device) -> None:
        # Asked for after a run that began without it, which `assemble/rules.py` refuses.
        field = "bf16_full_eval" if dtype is torch.bfloat16 else "fp16_full_eval"
        fix = "is not built for weights in the stages of a pipeline: load what was saved in one process"
        raise ConfigError(Problem(field, True, fix))


def lean_head_of_whole(module: nn.Module) -> LeanHead | None:
    """What makes the loss of the whole model without logits; None if only its own loss is exact, or it has no head."""
    core = without_adapters(module)
    getter = getattr(core, "get_output_embeddings", None)
    if not callable(getter) or head_of(core) is None:
        return None
    try:
        return LeanHead.measured(module, core)
    except InexactLossError:
        return None


def _refuse_unfit(module: nn.Module, all_ranks: Gang) -> None:
    for config in getattr(module, "peft_config", {}).values():
        if config.is_prompt_learning:
            fix = "learns prompts, which are not part of a stage of a pipeline: use LoRA, or set pp_size=1"
            raise ConfigError(Problem("peft_config", type(config).__name__, fix))
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        fix = "has an encoder and a decoder, which are not cut into stages; set pp_size=1"
        raise ConfigError(Problem("model", type(module).__name__, fix))
    if any(all_ranks.gather_objects(any(p.is_meta for p in module.parameters()))):
        fix = "is on the meta device on some processes, and a pipeline is cut on each: load it on all of them"
        raise ConfigError(Problem("model", type(module).__name__, fix))
