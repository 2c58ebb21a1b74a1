"""Replicated data parallelism (DDP): the backward of the last micro-batch averages gradients over ranks."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.config.plan import DistPlan
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger
from windlass.core.rng import preserved_rng
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded
from windlass.transforms.buffers import ForwardState, broadcast, is_ordinary
from windlass.transforms.comm_hooks import Compression
from windlass.transforms.recompute import recomputes_reentrantly
from windlass.transforms.strategy import Strategy, device_of, unfrozen
from windlass.transforms.unused import ReachedParameters

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a module: names that the wrapper ignores
_NOTHING = contextlib.nullcontext()
_CPP_ERROR = 2  # the level of errors in PyTorch's C++ code
job_logger = get_job_logger(__name__)


class Replicated(DistributedDataParallel):
    """`DistributedDataParallel` that counts its forwards and forwards attributes to its module.

    Hooks written for a bare model read `model.config` or `model.device`. A forward that bypasses the wrapper leaves
    gradients unreduced, which the executor detects by `forwards`.
    """

    forwards = 0
    advised = False
    # The next backward reduces gradients; those of one since were not reduced. See `_note_unreduced`.
    reduces_next = unreduced = False
    # Names of buffers that PyTorch cannot send, which every forward shares as well, and the ranks of the wrapper.
    shared_apart: Sequence[str] = ()
    ranks: Gang

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self.reduces_next = True
        if self.shared_apart and self.require_forward_param_sync:
            broadcast(map(self.module.get_buffer, self.shared_apart), self.ranks)
        if self.advised or not (self.find_unused_parameters and self.require_backward_grad_sync):
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.advised = True
        with _advice_at_info():
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextlib.contextmanager
def _advice_at_info() -> Iterator[None]:
    """Within the body, warnings of PyTorch's C++ code are printed with `log_level="info"` only, on the main process.

    The first forward that searches for unused parameters advises on each rank to turn the search off. It is on by
    default, so the user did not ask for it; and the advice may be wrong for later forwards.
    """
    file = Path(torch.__file__).parent / "lib" / "libc10.so"
    if job_logger.isEnabledFor(logging.INFO) or not file.is_file():
        yield
        return
    level = ctypes.c_int.in_dll(ctypes.CDLL(str(file)), "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, _CPP_ERROR)
    try:
        yield
    finally:
        level.value = before


def _note_unreduced(wrapper: Replicated) -> Any:
    """Note a second backward after the last forward: PyTorch reduces the gradients of the first one alone, and adds
    those of the second on each rank by itself, so that the replicas would end apart.

    By a hook of one parameter, which costs less than one of each: the first that is trained, on which the losses of a
    model usually depend. Returns its handle.
    """
    # The hook lasts as long as the parameter, which a script may keep when it has dropped the wrapper.
    held = weakref.ref(wrapper)

    def note(_: Tensor) -> None:
        alive = held()
        if alive is None:
            return
        if alive.reduces_next:
            # What was added before is reduced with it.
            alive.reduces_next = alive.unreduced = False
        elif alive.require_backward_grad_sync:
            alive.unreduced = True

    left_out = wrapper.parameters_to_ignore
    trained = (p for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in left_out)
    return next(trained).register_post_accumulate_grad_hook(note)


class DataParallel(Strategy):
    """Whole parameters and gradients on every rank.

    Args:
        module: on its device already; the same on every rank.
        plan: options of the wrapper.
        loss_ranks: all ranks of the job.
    """

    reduces = True

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang) -> None:
        super().__init__(module, loss_ranks)
        self._wrapper: Replicated | None = replicate(module, plan, loss_ranks)
        # Otherwise ranks have rank 0's buffers in each forward, which are saved with the weights.
        self.own.differs = not self._wrapper.broadcast_buffers
        _settle(self._wrapper)
        self._compression = Compression(self._wrapper, plan)
        self._seen = 0
        left_out = self._wrapper.parameters_to_ignore
        self._frozen = [
            p for name, p in module.named_parameters() if not p.requires_grad and name not in left_out
        ]
        # Those that are left out are averaged elsewhere (experts), or are to differ.
        self._trained = {id(p) for n, p in module.named_parameters() if p.requires_grad or n in left_out}
        # Under either option PyTorch finds unused parameters itself; otherwise the first update is checked.
        watched = not (self._wrapper.find_unused_parameters or plan.static_graph)
        self._watch = ReachedParameters(module, self._wrapper) if watched else None
        # A static graph may reach a parameter several times in one backward.
        self._hook = None if plan.static_graph else _note_unreduced(self._wrapper)

    @property
    def model(self) -> nn.Module:
        return self.module if self._wrapper is None else self._wrapper

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING if last or self._wrapper is None else self._wrapper.no_sync()

    def averages(self, parameter: Tensor) -> bool:
        return id(parameter) in self._trained

    def check_reached(self) -> None:
        if self._wrapper is None:
            return
        if self._wrapper.forwards == self._seen:
            raise ModelError(
                "the forward of this step bypassed the data-parallel wrapper, so its gradients were not reduced "
                "over ranks. Call the `model` that `compute_loss` or `training_step` receives (in a loop of your own, "
                "the one that `prepare` returned), not the bare one"
            )
        self._seen = self._wrapper.forwards
        if any(p.requires_grad for p in self._frozen):
            raise unfrozen()

    def check_used(self) -> None:
        if self._wrapper is not None and self._wrapper.unreduced:
            self._wrapper.unreduced = False
            raise ModelError(
                "the gradients of a backward were not reduced over ranks: after a forward of the data-parallel wrapper "
                "one backward reduces them, and this was another one, or its forward ran under no_sync. Add the losses "
                "and pass their sum to backward, or call the model before each backward"
            )
        if self._watch is not None and self._watch.seen:
            watch, self._watch = self._watch, None
            watch.stop()
            watch.check()

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run two discarded backwards of a static graph, so that buckets have their final order before the first real
        one (see `_settle`). Buffers, extra states, gradients and random generators are restored.
        """
        if self._wrapper is None or not self._wrapper.static_graph:
            return
        before = ForwardState(self.module)
        with preserved_rng(device_of(self.module)):
            for _ in range(2):
                backward()
                self.module.zero_grad(set_to_none=True)
        self._compression.forget()
        before.restore()

    def _release(self) -> None:
        # A process group that is still referenced at interpreter shutdown aborts the process.
        self._wrapper, self.own.differs = None, False
        if self._watch is not None:
            self._watch.stop()
        if self._hook is not None:
            self._hook.remove()
        self._watch = self._hook = None


class _Parameters(nn.Module):
    """In the place of a model: a forward in which every trained parameter has a part."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._trained = [p for p in module.parameters() if p.requires_grad and not is_sharded(p)]
        tables = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
        self._sparse = {table.weight for table in tables if table.sparse}

    def forward(self, _: None) -> Tensor:
        return torch.stack([self._part(parameter).sum().float() for parameter in self._trained]).sum()

    def _part(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._sparse:  # the wrapper takes no dense gradient of it
            row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
            return nn.functional.embedding(row, parameter, sparse=True)
        return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _settle(wrapper: Replicated) -> None:
    """Give the buckets of `wrapper` their final order now. Collective.

    DDP rebuilds its buckets after the first backward, in the order in which gradients arrived. The last bit of sums
    over three or more ranks depends on the buckets, so a resumed run would differ from an uninterrupted one, which has
    its first backward behind it. Two backwards of the parameters alone fix the order, which is then the same in both.
    They need no batch: a loop of the user's own has none yet. If unused parameters are searched for, buckets keep their
    first order. A static graph records its first backward, which has to be the model's (`DataParallel.warm_up`).
    """
    if wrapper.find_unused_parameters or wrapper.static_graph:
        return
    module, parameters = wrapper.module, _Parameters(wrapper.module)
    wrapper.module = parameters
    try:
        for _ in range(2):
            wrapper.require_forward_param_sync = False  # the stand-in has no buffers to send
            # PyTorch's own forward, which is not counted. On a device it needs an argument to send there.
            DistributedDataParallel.forward(wrapper, None).backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
    finally:
        wrapper.module = module


def replicate(module: nn.Module, plan: DistPlan, loss_ranks: Gang) -> Replicated:
    """Wrap `module`, already on its device, for data parallelism over all ranks of the job."""
    options: dict[str, Any] = {
        "find_unused_parameters": _searches(module, plan),
        "static_graph": plan.static_graph,
        # Gradients as views of the buckets: no copy before the optimizer reads them.
        "gradient_as_bucket_view": True,
    }
    if plan.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = plan.bucket_cap_mb
    if plan.broadcast_buffers is not None:
        options["broadcast_buffers"] = plan.broadcast_buffers
    device = device_of(module)
    # With a device named, DDP moves inputs there; on the host it refuses the option.
    if device.type not in ("cpu", "mps"):
        options["device_ids"] = [device]
    with warnings.catch_warnings():
        # Its successor also sends buffers once at the start, which ranks may have of their own.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return _wrap(module, options, loss_ranks)


def _searches(module: nn.Module, plan: DistPlan) -> bool:
    """Return True if each forward is to search its graph for parameters that it does not use.

    A re-entrant block hides its parameters from the search, which would take them as unused.
    """
    if plan.find_unused_parameters is None:
        return not (plan.static_graph or recomputes_reentrantly(module))
    return plan.find_unused_parameters


@contextlib.contextmanager
def leaving_out(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Within the body, wrappers of `module` leave these parameters as they are."""
    kept = getattr(module, _IGNORED, None)
    setattr(module, _IGNORED, [*(kept or ()), *names])
    try:
        yield
    finally:
        delattr(module, _IGNORED) if kept is None else setattr(module, _IGNORED, kept)


def _wrap(module: nn.Module, options: dict[str, Any], loss_ranks: Gang) -> Replicated:
    """Wrap `module`. Tensors that DDP cannot send are ignored by it and get rank 0's values here."""
    odd = [
        name
        for name, p in module.named_parameters()
        if not (p.requires_grad or is_ordinary(p) or is_sharded(p))
    ]
    odd_buffers = [name for name, buffer in module.named_buffers() if not is_ordinary(buffer)]
    if not odd and not odd_buffers:
        return Replicated(module, **options)
    broadcast([*map(module.get_parameter, odd), *map(module.get_buffer, odd_buffers)], loss_ranks)
    kept = getattr(module, _IGNORED, None)
    with leaving_out(module, [*odd, *odd_buffers]):
        wrapper = Replicated(module, **options)
    wrapper.ranks = loss_ranks
    if wrapper.broadcast_buffers:
        wrapper.shared_apart = [name for name in odd_buffers if name not in (kept or ())]
    return wrapper
