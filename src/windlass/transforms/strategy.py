"""How one model is distributed over ranks, and how by a single process. `strategies.py` is the registry of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import DistPlan
from windlass.core.errors import ModelError, Problem
from windlass.core.module_state import bare, state_of
from windlass.dist.gang import Gang
from windlass.dist.sharded import whole_on_first
from windlass.transforms.buffers import OwnState, broadcast, shared_buffers

_NOTHING = contextlib.nullcontext()


class Strategy:
    """How the model of an executor is distributed over ranks; here as of a single process, and the base of all others.

    Every strategy averages gradients over the ranks that have different targets (`loss_ranks`), so the share of each
    rank in the loss is multiplied by their number before its backward.

    Args:
        gang: ranks whose forwards each change their own buffers, and nothing sends them before the next
            forward; None: no ranks have such buffers.

    Attributes:
        model: called for forwards (a wrapper, or the module itself).
        module: the module of the user.
        sharded: each rank has parts of the parameters, so every forward is a collective and all ranks must make the
            same number of them.
        reduces: a backward reduces gradients over ranks, which `check_reached` and `check_used` verify.
        own: what checkpoints have of the model for each rank.
        saves_parts: checkpoints have the parts of each rank (`checkpoint/sharded.py`) instead of whole tensors.
        at_release: what else ends with it.
        unit_dtype: in which units compute, if that is not the dtype of their parameters.
        filling: the batch of the next forward has no weight: it is run because other ranks have one.
    """

    sharded = reduces = False
    saves_parts = False
    unit_dtype: torch.dtype | None = None
    filling = False

    def __init__(self, module: nn.Module, gang: Gang | None = None) -> None:
        self.module = module
        self._buffer_ranks = gang or Gang()
        self.own = OwnState(module, differs=self._buffer_ranks.size > 1)
        self.at_release: list[Callable[[], None]] = []
        # Asked once: norms and products are computed in each update, and kernels over lists take tensors of one device.
        # A model is on several by a `device_map`, or if all but some layers of a sharded one are kept on the host.
        devices = {p.device for p in module.parameters() if p.requires_grad}
        self._one_device = len(devices) <= 1
        self._has_sparse = any(getattr(part, "sparse", False) for part in module.modules())

    @property
    def model(self) -> nn.Module:
        return self.module

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one forward and backward: gradients are reduced over ranks in the last one of an update only."""
        return _NOTHING

    def accumulating(self) -> AbstractContextManager[Any]:
        """Context of all forwards and backwards of an update, in any order; `reduce` follows it."""
        return self.micro(last=False)

    def reduce(self) -> None:
        """Reduce gradients over ranks that were accumulated without it. Collective."""

    def stage_ended(self, tensor: Tensor) -> Tensor:
        """Called with the tensor with which a forward ends before the last stage of a pipeline. Returns it."""
        return tensor

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Global L2 norm of these gradients (`.grad` after the last micro-batch): a scalar on their device, the same on
        every rank. No host sync.
        """
        if not gradients:
            return torch.zeros((), device=device_of(self.module))
        if self._has_sparse:
            gradients = _values(gradients)
        if self._one_device:
            norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            return norms
        return torch.nn.utils.get_total_norm(gradients)

    @cached_property
    def _norm_dtype(self) -> torch.dtype:
        """The dtype of a norm that ranks add up: not that of gradients, of which ranks have different ones, or none."""
        precise = (torch.float64, torch.complex128)
        return torch.float64 if any(p.dtype in precise for p in self.module.parameters()) else torch.float32

    def norm_of_order(self, gradients: list[Tensor], order: float) -> Tensor:
        """As `total_norm`, of another order than 2; infinity is the largest magnitude."""
        if order < 0:
            # The zeros that a sparse one leaves out are its smallest elements.
            gradients = [g.to_dense() if g.is_sparse else g for g in gradients]
        return torch.nn.utils.get_total_norm(_values(gradients), order)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        """This rank's parts of them as plain tensors that share their memory, to be scaled in place."""
        return gradients

    def multiply(self, gradients: list[Tensor], factor: Tensor) -> None:
        """Multiply gradients by `factor` (a scalar), in place."""
        local = self.local(gradients)
        if not local:
            return
        # At least in single precision: rounded to bf16 the factor itself would be off by up to 0.4 %. And real: a real
        # gradient beside complex ones takes no complex factor.
        factor = factor.to(torch.promote_types(local[0].dtype.to_real(), torch.float32))
        if self._one_device and factor.device == local[0].device:
            torch._foreach_mul_(local, factor)
            return
        for device in {gradient.device for gradient in local}:
            torch._foreach_mul_([g for g in local if g.device == device], factor.to(device))

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        """The largest value of `flag` (scalar, fp32, on the device) over all ranks, in place, if ranks have different
        gradients; `flag` itself if all have the same.
        """
        return flag

    def reduced(self, parameter: nn.Parameter) -> Iterable[nn.Parameter]:
        """Called in a backward, once the gradient of `parameter` is complete on this rank: the parameters whose
        gradients are now reduced over ranks, each of which is returned once per backward. May be collective.
        """
        return (parameter,)

    def left_over(self) -> Iterable[nn.Parameter]:
        """Called after such a backward: the parameters that `reduced` has not returned. May be collective."""
        return ()

    def square(self, gradient: Tensor) -> Tensor:
        """This rank's part of the squared L2 norm of a reduced gradient: a scalar, at least in fp32. No host sync."""
        return squared_norm(gradient).to(device_of(self.module))

    def norm_of(self, square: Tensor) -> Tensor:
        """The global norm, from this rank's sum of `square`. Collective if ranks have different gradients."""
        return square.sqrt()

    def averages(self, parameter: Tensor) -> bool:
        """Return True if a gradient of `parameter` is averaged over ranks, also of one that requires it only now."""
        return True

    def check_reached(self) -> None:
        """Called once per update, after its backwards. Raises ModelError if no forward since the last call went through
        the module that reduces gradients.
        """

    def check_used(self) -> None:
        """Called before gradients are applied. Collective. Raises ModelError if the backward did not reach a parameter,
        so gradients were not reduced, or were reduced with those of another parameter.
        """

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run discarded backwards before the first update, so that a resumed run has the same bits."""

    def share_buffers(self) -> None:
        """Send the buffers of the first rank that has each to the others. Collective."""
        broadcast(self.module.buffers(), self._buffer_ranks)

    def buffers_of_first_rank(self) -> AbstractContextManager[Any]:
        """Context in which all ranks have the buffers of the first rank that has each, which are saved. Collective."""
        return shared_buffers(self.module, self.share_buffers) if self._buffer_ranks.size > 1 else _NOTHING

    def whole_state(self) -> dict[str, Any]:
        """The state dict with whole tensors by the names of the bare module, and extra states as they are. Collective.

        Complete on rank 0 (on the host if parameters are sharded), possibly empty on others.
        """
        return dict(bare(self.module).state_dict())

    def gathered(self) -> AbstractContextManager[Any]:
        """Context in which all ranks have whole parameters, to inspect them. Collective."""
        return _NOTHING

    def generating(self) -> AbstractContextManager[Any]:
        """Context in which parts of the module may be called by themselves, as `generate` does. Collective. Parameters
        are whole: parts compute with nothing but their own, and each rank generates as many tokens as it wants.
        """
        return self.gathered()

    def cast(self, dtype: torch.dtype, device: torch.device) -> None:
        """Cast the module to `dtype` in place, on `device`; later forwards compute in it. Training cannot undo it."""
        self.module.to(dtype=dtype, device=device)

    def release(self) -> None:
        """Release wrappers and their process groups after training; `model` is `module` from then on."""
        self._release()
        while self.at_release:
            self.at_release.pop()()

    def _release(self) -> None:
        """What a subclass releases."""


def whole_on_main(module: nn.Module, is_main: bool) -> dict[str, Any]:
    """The state dict of `module`, whose sharded tensors are gathered one at a time, tied ones once, onto the host of
    rank 0. Empty on other ranks. Collective.

    Args:
        is_main: this is rank 0 of the job.
    """
    gathered: dict[int, Tensor | None] = {}
    state: dict[str, Any] = {}
    own = state_of(module)  # kept to the end: a tensor that is freed would give its identity to another
    for name, value in own.items():
        if isinstance(value, Tensor) and id(value) not in gathered:
            gathered[id(value)] = whole_on_first(value.detach())
        if is_main:
            state[name] = gathered.get(id(value), value)
    return state


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared L2 norm of a plain tensor, at least in fp32: a scalar on its device."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm.square()


def device_of(module: nn.Module) -> torch.device:
    """Device of the first parameter or buffer of the module; the CPU if it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


# Fields of a plan that PyTorch's wrapper alone carries out, and the arguments that set them.
_OF_DDP = {
    "bucket_cap_mb": "ddp_bucket_cap_mb",
    "static_graph": "ddp_static_graph",
    "comm_hook": "comm_hook",
    "find_unused_parameters": "ddp_find_unused_parameters",
    "broadcast_buffers": "ddp_broadcast_buffers",
    "comm_wrapper": "comm_wrapper",
}


def unfrozen() -> ModelError:
    """The error of a parameter that requires gradients, or is there, only since the model was spread over ranks."""
    return ModelError(
        "parameters that were frozen when the run began, or were added since, require gradients now, and these would "
        "not be averaged over ranks: let them require gradients before train() or prepare(), in a group of the "
        "optimizer whose learning rate is 0 until they are to be trained"
    )


def _values(gradients: list[Tensor]) -> list[Tensor]:
    # Coalesced, because a row of an embedding may be in a sparse one more than once.
    return [g.coalesce().values() if g.is_sparse else g for g in gradients]


def embedding_problems(module: nn.Module, divided: bool) -> list[Problem]:
    """A problem for each trained embedding that several ranks cannot train as one process does. `divided`: ranks have
    parts of the parameters.
    """
    problems = []
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.weight.requires_grad:
            continue
        if part.max_norm is not None:
            fix = (
                "rewrites the rows that a forward reads, on the rank that reads them alone: train with one process, or "
                "normalize rows in the forward"
            )
            problems.append(Problem(f"model.{name}.max_norm", part.max_norm, fix))
        if part.sparse and divided:
            fix = "has gradients that are not dense, which a divided model cannot reduce: build it with sparse=False"
            problems.append(Problem(f"model.{name}.sparse", True, fix))
    return problems


def options_of_ddp(plan: DistPlan, fix: str, besides: str) -> list[Problem]:
    """A problem for each option of replicated data parallelism that `plan` sets, `besides` one that is honoured."""
    defaults = DistPlan()
    return [
        Problem(said, getattr(plan, name), fix)
        for name, said in _OF_DDP.items()
        if name != besides and getattr(plan, name) not in (None, getattr(defaults, name))
    ]
