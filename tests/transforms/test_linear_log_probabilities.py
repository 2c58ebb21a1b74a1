"""Log-probabilities of tokens and their gradients, compared with whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from windlass.transforms import linear_cross_entropy as chunks
from windlass.transforms.linear_log_probabilities import (
    TokenLogProbabilities,
    linear_log_probabilities,
    log_probabilities_of,
)

_CLASSES, _SIZE = 11, 5


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, _SIZE), (_CLASSES, _SIZE), (_CLASSES,))
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    )
    targets = torch.randint(0, _CLASSES, (9,), generator=generator)
    targets[::4] = -100
    return hidden, weight, bias, targets


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None
) -> TokenLogProbabilities:
    logits = linear(hidden, weight, bias) * scale
    return log_probabilities_of(
        logits if softcap is None else softcap * torch.tanh(logits / softcap), targets
    )


@pytest.fixture(params=[None, 2])
def _small_chunks(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(chunks, "_AT_ONCE", request.param * _CLASSES)
        monkeypatch.setattr(chunks, "_FEWEST", 1)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (2.0, 1.5)])
def test_values_and_gradients_are_those_of_whole_logits(
    has_bias: bool, scale: float, softcap: float | None
) -> None:
    hidden, weight, bias, targets = _tensors()
    given = (hidden, weight, bias if has_bias else None)
    ours = linear_log_probabilities(*given, targets, scale=scale, softcap=softcap)
    theirs = _plain(*given, targets, scale, softcap)
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, msg=name)
        assert one.requires_grad == (name == "log_probabilities")
    assert not ours.log_probabilities[::4].any()
    # Sums over answers that are compared, as a preference loss does: each token has a factor of its own.
    results = []
    for logs in (ours.log_probabilities, theirs.log_probabilities):
        loss = -torch.nn.functional.logsigmoid(logs[:5].sum() - 0.3 * logs[5:].square().sum())
        results.append(torch.autograd.grad(loss, [tensor for tensor in given if tensor is not None]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_the_gradient_of_a_gradient_is_refused_and_a_kept_graph_is_not() -> None:
    hidden, weight, bias, targets = _tensors()
    loss = linear_log_probabilities(hidden, weight, bias, targets).log_probabilities.square().sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden, retain_graph=True)[0])
    gradient = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_rounds_as_the_head(autocast: bool) -> None:
    hidden, weight, bias, targets = _tensors(torch.float32 if autocast else torch.bfloat16)
    rounded = [tensor.detach().bfloat16() for tensor in (hidden, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = linear_log_probabilities(hidden, weight, bias, targets).log_probabilities
    expected = log_probabilities_of(linear(*rounded), targets).log_probabilities
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    assert [tensor.grad.dtype for tensor in (hidden, weight, bias)] == [hidden.dtype] * 3


def test_no_tensor_of_tokens_times_classes_is_kept() -> None:
    hidden, weight, bias = torch.randn(40, 3), torch.randn(1000, 3), torch.randn(1000)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with saved_tensors_hooks(keep, unpack):
        linear_log_probabilities(
            hidden.requires_grad_(), weight.requires_grad_(), bias, torch.zeros(40, dtype=torch.int64)
        )
    assert kept
    assert max(kept) <= weight.numel()
