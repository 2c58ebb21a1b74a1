"""The loss, its figures and its gradients, compared with the formulas on whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from windlass.core.errors import ConfigError
from windlass.transforms import linear_cross_entropy as module
from windlass.transforms.linear_cross_entropy import LossOptions, linear_cross_entropy

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


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions
) -> Tensor:
    """The sum of losses by its definition."""
    logits = linear(hidden, weight, bias) * options.scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    losses = cross_entropy(
        logits,
        targets,
        weight=options.class_weights,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    if options.dynamic:
        losses = losses * torch.exp(-losses.detach())
    return (losses + options.z_loss * torch.logsumexp(logits, dim=1).square() * (targets != -100)).sum()


def _gradients(loss: Tensor, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(3.0 * loss, [t for t in tensors if t is not None]))


_WEIGHTS = torch.linspace(0.5, 2.0, _CLASSES, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"z_loss": 0.05},
        {"softcap": 1.5, "scale": 0.5},
        {"class_weights": _WEIGHTS},
        {"class_weights": _WEIGHTS, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0, "scale": 3.0},
        {"dynamic": True},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("at_once", [None, 3])
def test_loss_and_gradients(
    options: dict[str, Any], at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        monkeypatch.setattr(module, "_AT_ONCE", at_once * _CLASSES)
        monkeypatch.setattr(module, "_FEWEST", 1)
    *tensors, targets = _tensors()
    chosen = LossOptions(**options)
    ours = linear_cross_entropy(*tensors, targets, chosen).loss
    expected = _plain(*tensors, targets, chosen)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    for one, other in zip(_gradients(ours, tensors), _gradients(expected, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_figures() -> None:
    hidden, weight, bias, targets = _tensors()
    result = linear_cross_entropy(hidden, weight, bias, targets)
    real = targets != -100
    logs = linear(hidden, weight, bias)[real].log_softmax(dim=1)
    torch.testing.assert_close(result.entropy, -(logs.exp() * logs).sum())
    assert result.correct == (logs.argmax(dim=1) == targets[real]).sum()
    assert result.weight == real.sum()
    assert not result.entropy.requires_grad
    weighted = linear_cross_entropy(hidden, weight, bias, targets, LossOptions(class_weights=_WEIGHTS))
    torch.testing.assert_close(weighted.weight, _WEIGHTS[targets[real]].sum())


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
