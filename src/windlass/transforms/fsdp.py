"""Fully sharded data parallelism (FSDP2; arXiv:2304.11277): every rank has a part of parameters, gradients and
optimizer state. The parameters of a unit are gathered for its forward and its backward, and freed in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _BatchNorm

from windlass.config.plan import DistPlan, ShardPlan
from windlass.core import host
from windlass.core.errors import ConfigError, ModelError, Problem, refuse
from windlass.dist.device_mesh import fsdp_device_meshes
from windlass.dist.gang import Gang
from windlass.dist.sharded import Absent, is_sharded, present
from windlass.transforms.averaging import AfterBackward
from windlass.transforms.buffers import check_sparse
from windlass.transforms.expert_layers import divide_experts, expert_parameters
from windlass.transforms.first_rank import FirstRank, check_same_structure, to_meta
from windlass.transforms.fsdp_groups import groups_of, reset
from windlass.transforms.held_in_parts import HeldInParts
from windlass.transforms.recompute import apply_recompute
from windlass.transforms.strategy import options_of_ddp
from windlass.transforms.tensor_layers import undivided
from windlass.transforms.tensor_parallel import TensorDivision
from windlass.transforms.unused import SameOnAllRanks
from windlass.transforms.wrapping import ignored_parameters, listed, units_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


class FullyShardedModel(HeldInParts):
    """The module itself, with its parameters replaced by sharded ones. Collective.

    A module that was sharded before is not changed. If the loss ranks have a tensor gang each, the layers that its plan
    names are divided among its ranks first, and the parts are sharded.

    Args:
        module: the same on every rank, with the weights of rank 0; other ranks may have it on the meta device.
        plan: with `plan.shard`; by default every rank has a part of everything.
        device: for training.

    Raises:
        ConfigError: the plan cannot be applied to this module or world. ModelError: the module cannot be sharded.
    """

    reduces = True

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> None:
        self._loss_ranks, self._device = loss_ranks, device
        # Those that have parts of the model, of which a tensor gang has different ones.
        self._stage_ranks, self._tensor_ranks = loss_ranks.over("stage"), loss_ranks.over("tensor")
        self._plan = plan.shard or ShardPlan()
        self.unit_dtype = _DTYPES[self._plan.param_dtype]
        self.saves_parts = self._plan.state == "sharded"
        if isinstance(module, FSDPModule):
            _check_same_plan(module, self._plan)
        division = None
        if self._tensor_ranks.size > 1:
            division = TensorDivision(module, self._tensor_ranks, self._device, plan.tensor_positions)
        if not isinstance(module, FSDPModule):
            shard_(module, self._device, plan, loss_ranks, division)
        self._division = division
        _free_after_evaluations(module)
        # FSDP2 prepares itself in its first forward. That may be one of a measurement, which undoes what a forward does
        # to a module: hooks that free gathered parameters before a state dict would be gone.
        module._get_fsdp_state()._lazy_init()  # type: ignore[operator]
        super().__init__(module, self._stage_ranks)
        self._units: list[FSDPModule] = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._plain = _PlainGradients(module, loss_ranks)
        # Under `find_unused_parameters` zeros replace gradients that the backward of a rank did not reach.
        differing = (
            self._stage_ranks.size > 1 and self._stage_ranks.exists and not plan.find_unused_parameters
        )
        self._same = SameOnAllRanks(module, self._stage_ranks) if differing else None
        # The norm of gradients on the host is computed there.
        self._on_host = self._plan.cpu_offload and self._device.type != "cpu"
        self._norm_on_host = self._on_host or self._device.type == "cpu"
        self._forwards = self._seen = 0
        if division is not None:
            division.finish(self.unit_dtype)
        self._shared = AfterBackward([] if division is None else division.trainable, self._average_shared)
        self._hook = module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, arguments: Any) -> None:
        self._forwards += 1
        if self._same is not None:
            self._same.forget()

    # --- gradients --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        if not last:
            self._reduce(False)
        try:
            with self._plain.held(not last), self._shared.held(not last):
                yield
        except BaseException:
            self._abandon()
            raise
        finally:
            if not last:
                self._reduce(True)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Parameters stay gathered, and gradients whole, until `reduce`."""
        self._keep_gathered(True)
        try:
            with self.micro(last=False):
                yield
        finally:
            self._keep_gathered(False)

    def reduce(self) -> None:
        for unit in self._units:
            for group in groups_of(unit):
                group.post_backward()
        self._root._get_fsdp_state()._root_post_backward_final_callback()
        for unit in self._units:  # those that no backward reached
            unit.reshard()
        self._plain.reduce()
        self._average_shared()

    def stage_ended(self, tensor: Tensor) -> Tensor:
        """What FSDP2 does at the end of a forward, which does not return here."""
        found: Tensor = self.module._get_fsdp_state()._post_forward(self.module, (), tensor)  # type: ignore[operator]
        return found

    def _keep_gathered(self, yes: bool) -> None:
        self._free_after_forward(not yes)
        for unit in self._units:
            unit.set_reshard_after_backward(not yes, recurse=False)

    def _average_shared(self) -> None:
        """Average what is equal in a tensor gang over it, after FSDP2 has reduced it."""
        total = self._tensor_ranks.sum if self._on_host else self._tensor_ranks.sum_on_device
        if self._division is not None:
            self._division.average_shared(total, self._tensor_ranks.size)

    def _abandon(self) -> None:
        """Reset after an interrupted forward or backward, whose partial sums would corrupt the next one."""
        # FSDP2 has nothing to reset before its first forward.
        if not self._forwards:
            return
        reset(self._units)
        for unit in self._units:
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    # Sums over micro-batches, which FSDP2 does not reset before torch 2.15. From then
                    # on the second is a read-only view of the first.
                    gathered: Tensor | None = getattr(parameter, "_unsharded_param", None)
                    if gathered is not None:
                        gathered.grad = None
                    if parameter.unsharded_accumulated_grad is not None:
                        parameter.unsharded_accumulated_grad = None

    @property
    def _root(self) -> FSDPModule:
        return self._units[0]

    def _reduce(self, yes: bool) -> None:
        """Set whether the next backward reduces gradients over ranks, or only accumulates unsharded ones."""
        for unit in self._units:
            unit.set_requires_gradient_sync(yes, recurse=False)
        self._root.set_is_last_backward(yes)

    @property
    def _norm_device(self) -> torch.device:
        return torch.device("cpu") if self._on_host else self._device

    def _sum_of_norm(self, square: Tensor) -> Tensor:
        """The sum over ranks. On the host, what the backwards of ranks reached is compared in the same exchange."""
        exchange = self._stage_ranks.sum if self._on_host else self._stage_ranks.sum_on_device
        if self._same is None or not square.is_cpu:
            return exchange(square)
        numbers = torch.tensor([0.0, *self._same.numbers()], dtype=torch.float64)
        numbers[0] = square
        sums = exchange(numbers)
        self._same.compare(host.read(sums[1:]))
        return sums[0]

    def _max_of_norm(self, value: Tensor) -> Tensor:
        return super()._max_of_norm(value.to(self._device))

    def reduced(self, parameter: nn.Parameter) -> Iterable[nn.Parameter]:
        if self._same is not None:
            self._same.note(parameter)
        return () if self._plain.averages(parameter) else (parameter,)

    def left_over(self) -> Iterable[nn.Parameter]:
        return self._plain.averaged()

    def averages(self, parameter: Tensor) -> bool:
        return self._loss_ranks.size == 1 or is_sharded(parameter) or self._plain.averages(parameter)

    def check_reached(self) -> None:
        if self._forwards == self._seen:
            raise ModelError(
                "the forward of this step bypassed the sharded model, so its gradients were not reduced over ranks. "
                "Call the `model` that `compute_loss` or `training_step` receives (in a loop of your own, the one that "
                "`prepare` returned), and call it as `model(...)`: `model.forward(...)` gathers no parameters"
            )
        self._seen = self._forwards
        if self._same is not None and not self._norm_on_host:
            self._same.ask()

    def check_used(self) -> None:
        if self._same is not None:
            self._same.check()

    # --- weights ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """In the dtype of forwards (`param_dtype`); changes to parameters are lost. A `state_dict()` ends it early: it
        returns sharded tensors.

        Forwards inside do not communicate, so ranks may make different numbers of them, unless parameters are resharded
        to a smaller group of ranks (a whole number for `reshard`).
        """
        self._free_after_forward(False)
        self.module._is_gathered = True  # type: ignore[assignment]
        try:
            for unit in self._units:  # the memory for the next one may not be there
                unit.unshard()
            with undivided(self.module):
                yield
        finally:
            self.module._is_gathered = False  # type: ignore[assignment]
            for unit in self._units:
                unit.reshard()
            self._free_after_forward(True)

    def cast(self, dtype: torch.dtype, device: torch.device) -> None:
        """Offloaded parameters stay on the host."""
        self.module.to(dtype=dtype)
        for unit in self._units:
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    # Made in the dtype of the first gathering, and kept for the later ones.
                    parameter.all_gather_outputs = []
                    vars(parameter).pop("_unsharded_param", None)

    def _free_after_forward(self, yes: bool) -> None:
        if self._plan.reshard is True:
            for unit in self._units[1:]:
                unit.set_reshard_after_forward(yes, recurse=False)

    def _release(self) -> None:
        """The module stays sharded: the whole one may not fit into memory."""
        self._hook.remove()
        self._plain.release()
        self._shared.release()


def shard_(
    module: nn.Module,
    device: torch.device,
    plan: DistPlan,
    loss_ranks: Gang,
    division: TensorDivision | None,
) -> None:
    """Replace the parameters by sharded ones with rank 0's values, inner units first; those of layers that `division`
    names by this rank's parts of them before. Collective.
    """
    chosen = plan.shard or ShardPlan()
    _check(plan, device)
    _check_adapters(module)
    _check_batch_norms(module, chosen, device)
    mesh, tensor_mesh = fsdp_device_meshes(loss_ranks.mesh.with_replicas(chosen.replicas), device)
    stage_ranks = loss_ranks.over("stage")
    if chosen.ram_efficient and not loss_ranks.world.is_local_main:
        to_meta(module)
    check_same_structure(module, stage_ranks)
    check_sparse(module, stage_ranks)
    first = FirstRank(module, device, stage_ranks, by_machine=chosen.ram_efficient)
    first.place(module.buffers())
    absent = {p for p in module.parameters() if isinstance(p, Absent)}
    ignored = ignored_parameters(module, chosen.ignored) | absent
    # In the order of the module: that of a set differs between ranks.
    first.place(parameter for parameter in present(module.parameters()) if parameter in ignored)
    if loss_ranks.mesh.expert > 1:
        divide_experts(module, first, loss_ranks, device)
    ignored = ignored_parameters(module, chosen.ignored) | set(expert_parameters(module)) | absent
    units = [u for u in units_of(module, chosen, ignored) if absent.isdisjoint(u.parameters())]
    if chosen.recompute:
        apply_recompute(module, {"offload": chosen.recompute_offload}, units)
    for unit in (*reversed(units), module):
        own = [p for p in unit.parameters() if p not in ignored and not is_sharded(p)]
        _check_one_dtype(unit, own)
        first.place(own)
        if division is not None and tensor_mesh is not None:
            division.apply(unit, tensor_mesh)
        fully_shard(
            unit,
            mesh=mesh,
            # The parameters of the root are needed first in the backward.
            reshard_after_forward=False if unit is module else chosen.reshard,
            mp_policy=_precision(chosen, root=unit is module),
            offload_policy=CPUOffloadPolicy(device.type != "cpu") if chosen.cpu_offload else OffloadPolicy(),
            ignored_params=ignored,
        )
    _set_order([m for m in module.modules() if isinstance(m, FSDPModule)], plan, chosen)
    module._sharded_by = chosen  # type: ignore[assignment]


def _free_after_evaluations(module: nn.Module) -> None:
    """Free the root's parameters after forwards without gradients: they stay gathered for a backward, which an
    evaluation does not have. The hook is registered once per module.
    """
    assert isinstance(module, FSDPModule)
    module.reshard()
    if not hasattr(module, "_is_gathered"):
        module._is_gathered = False  # type: ignore[assignment]
        module.register_forward_hook(_free_root)


def _free_root(module: Any, arguments: Any, output: Any) -> None:
    if not torch.is_grad_enabled() and not module._is_gathered:
        module.reshard()


def _check_same_plan(module: nn.Module, plan: ShardPlan) -> None:
    """Check that the plan is that of the first sharding, except for the form of checkpoints."""
    before = getattr(module, "_sharded_by", plan)
    refuse(
        Problem(f"fsdp ({name})", value, f"this model was sharded with {was!r} and stays so; build it again")
        for name, value in asdict(plan).items()
        if (was := getattr(before, name)) != value and name not in ("state", "ram_efficient")
    )


def _check_one_dtype(unit: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Check that the trained weights of a unit, which FSDP keeps together, have one dtype, also where it computes in
    another.
    """
    dtypes = sorted({str(p.dtype) for p in parameters if p.requires_grad})
    if len(dtypes) > 1:
        raise ModelError(
            f"{type(unit).__name__} trains parameters of several dtypes ({', '.join(dtypes)}), whose gradients cannot "
            "be reduced together: convert the model to one dtype (`model.to(torch.float32)`), and set bf16=True if it "
            "is to compute in bf16"
        )


def _check(plan: DistPlan, device: torch.device) -> None:
    only_ddp = "applies to replicated data parallelism only; leave it out, or do not shard"
    problems = options_of_ddp(plan, only_ddp, besides="find_unused_parameters")
    if device.type == "mps":
        problems.append(
            Problem("fsdp", True, "PyTorch has no collectives on mps; train there with one process")
        )
    refuse(problems)


def _check_adapters(module: nn.Module) -> None:
    for config in getattr(module, "peft_config", {}).values():
        if getattr(config.peft_type, "value", None) == "ADALORA":
            fix = "reads all of its weights after the forward, when a sharded model has parts: use LoRA, or several "
            raise ConfigError(Problem("peft_config", type(config).__name__, f"{fix}processes without fsdp"))


def _check_batch_norms(module: nn.Module, plan: ShardPlan, device: torch.device) -> None:
    """Check that the host can compute them: it takes weights in the dtype of the running statistics alone, which stay
    as they are.
    """
    if device.type != "cpu" or plan.param_dtype is None:
        return
    ignored = ignored_parameters(module, plan.ignored)
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.weight is not None and part.weight not in ignored
        if part.running_mean is not None and part.running_mean.dtype != _DTYPES[plan.param_dtype]
    ]
    if found:
        fix = (
            f"the CPU computes no batch norm with weights in {plan.param_dtype} and running statistics in another "
            f"dtype ({listed(found)}). Name these modules here, by a regular expression for their whole names: they "
            "stay whole and as they are. Or leave out the mixed precision"
        )
        raise ConfigError(Problem("fsdp_config.ignored_modules", plan.ignored, fix))


def _precision(plan: ShardPlan, root: bool) -> MixedPrecisionPolicy:
    """Outputs of inner units are not converted: layers of the root compute in `param_dtype` too."""
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[plan.param_dtype],
        reduce_dtype=_DTYPES[plan.reduce_dtype],
        output_dtype=_DTYPES[plan.output_dtype] if root else None,
    )


def _set_order(units: list[FSDPModule], plan: DistPlan, chosen: ShardPlan) -> None:
    """Set explicit prefetching in the order in which modules were defined, the root first."""
    for index, unit in enumerate(units):
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(bool(plan.find_unused_parameters), recurse=False)
        elif plan.find_unused_parameters:
            fix = f"a sharded model needs a newer torch than {torch.__version__} for it; leave it out, or update torch"
            raise ConfigError(Problem("ddp_find_unused_parameters", True, fix))
        if chosen.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 :][: chosen.forward_prefetch])
        if chosen.backward_prefetch:
            # The backward of the root begins with the last unit.
            before = units[:0:-1] if index == 0 else units[index - 1 : 0 : -1]
            unit.set_modules_to_backward_prefetch(before[: chosen.backward_prefetch])


class _PlainGradients(AfterBackward):
    """Averages gradients of trained parameters that are not sharded over ranks, at the end of a backward.

    Zeros replace gradients that this rank's backward did not reach. A backward that reaches none of them on one rank
    must reach none on the others.
    """

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        plain = [p for p in present(module.parameters()) if not is_sharded(p) and p.requires_grad]
        self._loss_ranks, self._parameters = loss_ranks, plain if loss_ranks.size > 1 else []
        super().__init__(self._parameters, self.reduce)

    def reduce(self) -> None:
        """Average them now."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dist.all_reduce(gradient, group=self._loss_ranks.device_group)
            gradient.div_(self._loss_ranks.size)

    def averages(self, parameter: Tensor) -> bool:
        """Return True if the gradient of `parameter` is averaged at the end of a backward."""
        return any(parameter is own for own in self._parameters)

    def averaged(self) -> list[nn.Parameter]:
        """The parameters whose gradients were averaged."""
        return [p for p in self._parameters if p.grad is not None]
