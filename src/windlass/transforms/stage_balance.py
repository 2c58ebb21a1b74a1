"""The balancing loss of experts that are in several stages of a pipeline.

It is a product of two means over the tokens of all layers, so it is not a sum over stages. The sums of routers, of
which it is made (`whole_balance.py`), are: each stage adds those of its layers to what the stage before sent, and sends
them on in the tensor with which it ends. The last stage makes the loss, and its gradient returns by the same way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.pipeline_cut import Cut
from windlass.transforms.stage_forwards import Call
from windlass.transforms.whole_balance import WholeBalance, balance, router_sums


class StageBalance(WholeBalance):
    """Counts what routers choose in the stages of this rank. Without a balancing loss it does nothing.

    Args:
        module: whole.
    """

    def __init__(
        self, module: nn.Module, loss_ranks: Gang, everywhere: bool, is_filling: Callable[[], bool]
    ) -> None:
        super().__init__(module, loss_ranks, everywhere, is_filling)
        self._module, self._parameters = module, inspect.signature(module.forward).parameters
        self._owner = module  # whose forward computes the loss
        self._experts, self._chosen = 0, 0  # of a layer, and of these for a token; 0 without a balancing loss
        self._logits: list[Tensor] | None = None  # of routers, in a forward
        self._before: Tensor | None = None  # from earlier stages

    # --- routers ----------------------------------------------------------------------------------------------------

    def cut(self, find: Callable[[], tuple[Cut, Any]]) -> tuple[Cut, Any]:
        """What `find` returns, which runs the whole model: the routers are the modules that return `router_logits` of
        its output.
        """
        returned: list[tuple[nn.Module, int | None, Tensor]] = []

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            pairs = enumerate(output) if isinstance(output, tuple) else [(None, output)]
            returned.extend((module, place, value) for place, value in pairs if isinstance(value, Tensor))

        with contextlib.ExitStack() as stack:
            for module in self._module.modules():
                stack.enter_context(module.register_forward_hook(note))
            stack.enter_context(self.applied())
            found, output = find()
        for logits in (output.get("router_logits") if isinstance(output, Mapping) else None) or ():
            self._watch(logits, returned)
        return found, output

    def _watch(self, logits: Tensor, returned: list[tuple[nn.Module, int | None, Tensor]]) -> None:
        for module, place, value in returned:
            if value is logits:
                module.register_forward_hook(self._noting(place))
                self._experts = logits.shape[-1]
                return
        raise ModelError(
            f"{type(self._module).__name__} changes what its routers return, so the balancing loss of its experts "
            "cannot be computed over the stages of a pipeline. Set output_router_logits=False in its configuration, or "
            "pp_size=1"
        )

    def _noting(self, place: int | None) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._logits is not None:  # layers are computed again in the backward
                self._logits.append(output if place is None else output[place])

        return note

    def _balance(
        self,
        part: nn.Module,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if self._logits is None:  # the whole model
            self._owner, self._chosen = part, top_k
            return balance(router_sums(gate_logits, top_k, attention_mask))
        return self.of_ranks(part, self._sums(attention_mask))

    # --- stages -----------------------------------------------------------------------------------------------------

    def begin(self, received: Tensor | None) -> Tensor | None:
        """What a stage begins with, of what the stage before sent."""
        self._before = None
        if received is None or not self._experts:
            return received
        states: Tensor
        states, self._before = Apart.apply(received, self._experts)  # type: ignore[no-untyped-call]
        return states

    def room(self, like: Tensor) -> Tensor:
        """Memory for what the stage before sends with a tensor like this one."""
        return _joined(like, _no_sums(like, self._experts)) if self._experts else like

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the forward of a stage."""
        self._logits = []
        try:
            with self.applied():
                yield
        finally:
            self._logits = None

    def end(self, tensor: Tensor, call: Call) -> Tensor:
        """What a stage sends: the tensor with which it ends, and sums. Called within `forward`, with its arguments."""
        if not self._experts:
            return tensor
        given = {**dict(zip(self._parameters, call[0], strict=False)), **call[1]}
        sums = self._sums(given.get("attention_mask"))
        return Together.apply(tensor, sums.to(_wide(tensor)))  # type: ignore[no-untyped-call, no-any-return]

    def _sums(self, mask: Tensor | None) -> Tensor:
        """Of the stages up to this one."""
        assert self._logits is not None
        logits = tuple(self._logits)
        own = self.counted(self._owner, logits, self._chosen, mask) if logits else None
        found = [sums for sums in (self._before, own) if sums is not None]
        return sum(found[1:], found[0]) if found else torch.zeros(3, self._experts)


class Together(torch.autograd.Function):
    """A tensor of shape (rows, tokens, width), and the bytes of `sums` as further tokens: in bfloat16 they would be
    rounded.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sums: Tensor) -> Tensor:
        ctx.experts = sums.shape[-1]
        return _joined(tensor, sums)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return _parted(gradient, ctx.experts)


class Apart(torch.autograd.Function):
    """The inverse of `Together`."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        return _parted(joined, experts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor, None]:
        return _joined(gradient, of_sums), None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _no_sums(tensor: Tensor, experts: int) -> Tensor:
    return torch.zeros(3, experts, dtype=_wide(tensor), device=tensor.device)


def _joined(tensor: Tensor, sums: Tensor) -> Tensor:
    rows, _, width = tensor.shape
    flat = sums.detach().to(tensor.device).contiguous().view(-1).view(tensor.dtype)
    room = tensor.new_zeros(-(-len(flat) // (rows * width)) * rows * width)
    # As further tokens: all that one stage sends is one tensor, whose header says its size.
    room[: len(flat)] = flat
    return torch.cat([tensor.detach(), room.view(rows, -1, width)], 1)


def _parted(joined: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    rows, _, width = joined.shape
    dtype = _wide(joined)
    count = 3 * experts * dtype.itemsize // joined.dtype.itemsize
    further = -(-count // (rows * width))
    flat = joined[:, -further:].reshape(-1)[:count].contiguous()
    return joined[:, :-further].clone(), flat.view(dtype).view(3, experts).clone()
