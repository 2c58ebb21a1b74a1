"""The balancing loss of a mixture of experts over the batches of all ranks together (Fedus et al., "Switch
Transformers", arXiv:2101.03961, equations 4 to 6).

It is a product of two means over tokens: the share of tokens that an expert gets, and its probability. The product of
means over all ranks is not the mean of their products, so that the means are taken over all ranks first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.context import division_of
from windlass.transforms.linear_exchange import exchange

_NAME = "load_balancing_loss_func"


class WholeBalance:
    """The balancing loss of the batches of all ranks, in place of a model's own. A model of transformers computes it by
    a function of its file, which is replaced during its forwards.

    Args:
        module: a mixture of transformers, or any other, whose forwards are left as they are.
        loss_ranks: each training forward with gradients, and its backward, needs all of them if `everywhere`, and
            others those of its context.
        everywhere: balance the batches of all ranks that reduce gradients together, and not of each context.
        is_filling: returns True if the batch of this rank does not count.

    Raises:
        ModelError: the model defines the balancing loss in another way.
    """

    def __init__(
        self, module: nn.Module, loss_ranks: Gang, everywhere: bool, is_filling: Callable[[], bool]
    ) -> None:
        self._ranks, self._everywhere, self._is_filling = loss_ranks, everywhere, is_filling
        self._hooks: list[Any] = []
        self._owners: list[tuple[nn.Module, dict[str, Any], Any]] = []
        for part in module.modules():
            namespace = _namespace_of(part)
            if namespace is not None:
                _check_same(part, namespace[_NAME])
                self._owners.append((part, namespace, namespace[_NAME]))

    def attach(self) -> None:
        """Replace it in all forwards, until `release`."""
        for owner in self._owners:
            self._during_forwards(*owner)

    def _during_forwards(self, part: nn.Module, namespace: dict[str, Any], own: Any) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            namespace[_NAME] = partial(self._balance, module)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            namespace[_NAME] = own

        self._hooks += [
            part.register_forward_pre_hook(enter),
            # After an error too: other models call the function of that file.
            part.register_forward_hook(leave, always_call=True),
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace it in the forwards within: of a stage, which may end without their end."""
        for part, namespace, _ in self._owners:
            namespace[_NAME] = partial(self._balance, part)
        try:
            yield
        finally:
            for _, namespace, own in self._owners:
                namespace[_NAME] = own

    def _balance(
        self,
        part: nn.Module,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if not isinstance(gate_logits, tuple):
            return 0
        return self.of_ranks(part, self.counted(part, gate_logits, top_k, attention_mask))

    def counted(self, part: nn.Module, logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> Tensor:
        """`router_sums` of what this rank has of a batch; zeros if that does not count."""
        division = division_of(part)
        sums = router_sums(logits, top_k, mask if division is None else division.real)
        # Times zero and not zeros: with its graph this rank takes part in the exchange of the backward.
        return sums * 0.0 if self._is_filling() else sums

    def of_ranks(self, part: nn.Module, sums: Tensor) -> Tensor:
        """The loss of the sums of all ranks; of rows that are divided, an equal share of it for each rank."""
        division = division_of(part)
        # An evaluation has one loss of each batch, on any number of ranks; ranks generate so many tokens each.
        everywhere = self._everywhere and part.training and torch.is_grad_enabled()
        if everywhere or division is not None:
            ranks = self._ranks if everywhere else self._ranks.over("context")

            def total(share: Tensor) -> Tensor:
                return ranks.sum_on_device(share.detach().clone(memory_format=torch.contiguous_format))

            # Each rank's loss depends on the sum, so that its gradient is the sum of theirs.
            sums = exchange(sums, total, total)
        return balance(sums) / (1 if division is None else division.zigzag.size)

    def release(self) -> None:
        """Restore the model's own loss."""
        for hook in self._hooks:
            hook.remove()


def router_sums(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> Tensor:
    """Sums over the tokens of all layers, for each expert: how often it was chosen, its probability, and 1.

    Args:
        logits: of each layer, shape (tokens, experts).
        mask: 1 for each token that is not padding, of any shape with as many elements.

    Returns:
        Shape (3, experts), at least in fp32.
    """
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    device = logits[0].device
    sums = torch.zeros(3, logits[0].shape[-1], dtype=dtype, device=device)
    kept = None if mask is None else mask.reshape(-1, 1).to(device, dtype)
    for layer in logits:
        probabilities = layer.to(device).softmax(-1)
        chosen = torch.zeros_like(probabilities, dtype=dtype)
        chosen.scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1)
        each = torch.stack([chosen, probabilities.to(dtype), torch.ones_like(chosen)])
        sums = sums + (each if kept is None else each * kept).sum(1)
    return sums


def balance(sums: Tensor) -> Tensor:
    """The loss of `router_sums`: 1 per chosen expert of a token if all experts are chosen equally often. In fp32."""
    chosen, probability, tokens = sums
    tokens = tokens.clamp(min=1)  # 0 if no rank has a batch that counts
    loss: Tensor = ((chosen / tokens) * (probability / tokens)).sum() * len(tokens)
    return loss.float()


def _namespace_of(part: nn.Module) -> dict[str, Any] | None:
    """The names of the file whose balancing loss the forward of `part` calls; None if it calls none."""
    # transformers decorates forwards.
    forward = inspect.unwrap(type(part).forward)
    names = getattr(forward, "__globals__", {})
    calls = _NAME in getattr(getattr(forward, "__code__", None), "co_names", ())
    return names if calls and _NAME in names else None


def _check_same(part: nn.Module, own: Any) -> None:
    """Raise ModelError if the model's function has another result than the one here, on four tokens of two layers."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(4, 3, generator=generator) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1], [1, 0]])):
        expected, found = own(logits, 3, 2, mask), balance(router_sums(logits, 2, mask))
        if not torch.allclose(torch.as_tensor(expected), found, rtol=1e-5):
            raise ModelError(
                f"{type(part).__name__} defines the balancing loss of its experts in a way that is not known here, so "
                "that it cannot be computed over the batches of all ranks. Train it with ep_size=1"
            )
