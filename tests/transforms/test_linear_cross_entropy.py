"""The loss, its figures and its gradients, compared with the formulas on whole logits."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError
from windlass.transforms import linear_cross_entropy as module
from windlass.transforms.linear_cross_entropy import LinearLoss, LossOptions, linear_cross_entropy
from windlass.transforms.linear_log_probabilities import linear_log_probabilities

_CLASSES, _SIZE = 11, 5


def _tensors(dtype: torch.dtype = torch.float64, targets: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((targets, _SIZE), (_CLASSES, _SIZE), (_CLASSES,))
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes
    )
    classes = torch.randint(0, _CLASSES, (targets,), generator=generator)
    classes[::4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), classes


def _by_definition(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions
) -> LinearLoss:
    """From whole logits."""
    logits = linear(hidden, weight, bias) * options.scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logs, real = logits.log_softmax(1), targets != -100
    classes = torch.where(real, targets, 0)
    weights = logits.new_ones(len(weight)) if options.class_weights is None else options.class_weights
    chosen = logs.gather(1, classes[:, None])[:, 0]
    if options.dynamic:
        chosen = chosen * chosen.detach().exp()
    losses = (
        (options.label_smoothing - 1) * weights[classes] * chosen
        - options.label_smoothing * (weights * logs).mean(1)
        + options.z_loss * logits.logsumexp(1).square()
    )
    figures = losses, -(logs.exp() * logs).sum(1), (logits.argmax(1) == targets).to(logs), weights[classes]
    return LinearLoss(*(torch.where(real, values, 0).sum() for values in figures))


def _gradients(loss: Tensor, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(3.0 * loss, [t for t in tensors if t is not None]))


@given(st.integers(0, 2**32))
def test_drawn_losses_figures_and_gradients(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, classes, size = rng.choice((0, 1, 2, 7, 30)), rng.choice((1, 2, 3, 11, 40)), rng.choice((1, 2, 5))

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(*reversed(shape), generator=generator, dtype=torch.float64)
        # Whole numbers make equal logits, of which the first is the prediction.
        values = values.round() if rng.random() < 0.4 else values * rng.choice((0.1, 1, 5))
        return values.T.contiguous() if rng.random() < 0.6 else values.T

    targets = torch.randint(0, classes, (count,), generator=generator)
    targets[torch.rand(count, generator=generator) < rng.choice((0, 0.3, 1))] = -100
    options = LossOptions(
        scale=rng.choice((1.0, 0.5, 3.0)),
        softcap=rng.choice((None, 0.7, 20.0)),
        label_smoothing=rng.choice((0.0, 0.1, 1.0)),
        z_loss=rng.choice((0.0, 0.1)),
        class_weights=rng.choice((None, torch.rand(classes, generator=generator, dtype=torch.float64))),
        dynamic=rng.random() < 0.3,
    )
    tensors = (drawn(count, size), drawn(classes, size), drawn(1, classes)[0] if rng.random() < 0.6 else None)
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_(rng.random() < 0.8)
    trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    with attributes_of(module, _AT_ONCE=rng.choice((1, 3 * classes, 2**22)), _FEWEST=rng.choice((1, 2, 128))):
        found = linear_cross_entropy(*tensors, targets, options)
    expected = _by_definition(*tensors, targets, options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not any(figure.requires_grad for figure in found[1:])
    if trained:
        wanted = torch.autograd.grad(2.5 * expected.loss, trained, allow_unused=True, materialize_grads=True)
        for one, other in zip(torch.autograd.grad(2.5 * found.loss, trained), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kept", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_gradients_that_are_needed(kept: tuple[bool, ...]) -> None:
    *tensors, targets = _tensors()
    for tensor, wanted in zip(tensors, kept, strict=True):
        tensor.requires_grad_(wanted)
    loss = linear_cross_entropy(*tensors, targets).loss
    assert loss.requires_grad == any(kept)
    if any(kept):
        loss.backward()
    assert tuple(tensor.grad is not None for tensor in tensors) == kept


def test_without_a_bias_and_without_a_target() -> None:
    hidden, weight, _, targets = _tensors()
    empty = linear_cross_entropy(hidden[:0], weight, None, targets[:0]).loss
    ignored = linear_cross_entropy(hidden, weight, None, torch.full_like(targets, -100)).loss
    for loss in (empty, ignored):
        assert loss == 0
        for gradient in _gradients(loss, (hidden, weight)):
            assert not gradient.any()


@pytest.mark.parametrize("target", [_CLASSES, -5])
def test_a_target_that_is_no_class_is_an_error_as_in_torch(target: int) -> None:
    hidden, weight, bias, targets = _tensors()
    targets[3] = target
    for compute in (linear_cross_entropy, linear_log_probabilities):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            compute(hidden, weight, bias, targets)


def test_half_precision_rounds_as_the_head_does() -> None:
    *tensors, targets = _tensors(torch.bfloat16)
    ours = linear_cross_entropy(*tensors, targets).loss
    expected = cross_entropy(linear(*tensors).float(), targets, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    for one, other in zip(
        _gradients(ours, tuple(tensors)), _gradients(expected, tuple(tensors)), strict=True
    ):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_autocast() -> None:
    *tensors, targets = _tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(*tensors, targets).loss
        expected = cross_entropy(linear(*tensors).float(), targets, reduction="sum")
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert [gradient.dtype for gradient in _gradients(ours, tuple(tensors))] == [torch.float32] * 3


@pytest.mark.parametrize("targets", [300, 700, 1000])
def test_what_divides_the_loss_is_not_rounded_to_half_precision(targets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 32, generator=generator).bfloat16() for size in (targets, 64))
    classes = torch.randint(0, 64, (targets,), generator=generator)
    found, exact = (
        [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        for dtype in (torch.bfloat16, torch.float64)
    )
    for loss, tensors in (
        (linear_cross_entropy(*found, None, classes).loss, found),
        (cross_entropy(linear(*exact), classes, reduction="sum"), exact),
    ):
        (loss / targets).backward(inputs=tensors)
    for one, other in zip(found, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        # Roundings of single elements cancel in the length along the exact gradient; that of the factor is in it.
        length = (one.grad.double() * other.grad).sum() / other.grad.square().sum()
        torch.testing.assert_close(length, torch.ones_like(length), rtol=4e-4, atol=0)


def test_a_second_backward_needs_a_graph_that_is_kept() -> None:
    """LOMO with clipping goes twice through one graph."""
    *tensors, targets = _tensors()
    loss = linear_cross_entropy(*tensors, targets).loss
    first = torch.autograd.grad(3 * loss, tensors, retain_graph=True)
    loss.backward()
    for tensor, gradient in zip(tensors, first, strict=True):
        torch.testing.assert_close(gradient, 3 * tensor.grad)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


@pytest.mark.parametrize("options", [{"label_smoothing": 1.5}, {"z_loss": -1.0}, {"z_loss": float("nan")}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LossOptions(**options)  # type: ignore[arg-type]


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module.HeadGradients, "add", fail)
    *tensors, targets = _tensors()
    with torch.no_grad():
        assert not linear_cross_entropy(*tensors, targets).loss.requires_grad


def test_autocast_leaves_double_precision() -> None:
    *tensors, targets = _tensors()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*tensors, targets).loss
    assert torch.equal(loss, linear_cross_entropy(*tensors, targets).loss)
