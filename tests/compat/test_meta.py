"""Models built without weights."""

from __future__ import annotations

import pytest
import torch
from tests.compat.big_models import Model
from torch import nn

from windlass.compat.big_models.big_model import init_empty_weights, init_on_device
from windlass.compat.big_models.module_tensors import find_tied_parameters
from windlass.core.errors import ModelError


def test_parameters_have_no_data_and_buffers_do() -> None:
    with init_empty_weights():
        model = Model()
    assert all(param.is_meta for param in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        n: tuple(p.shape) for n, p in Model().named_parameters()
    }
    assert not any(param.is_meta for param in Model().parameters()), "the context must not outlive itself"


def test_buffers_too_when_asked() -> None:
    with init_empty_weights(include_buffers=True):
        model = Model()
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(("word", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_variable_decides_when_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, word: str, expected: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", word)
    with init_empty_weights():
        model = Model()
    assert any(buffer.is_meta for buffer in model.buffers()) is expected


def test_memory_does_not_grow_with_the_model() -> None:
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10_000, 10_000, bias=False) for _ in range(1000)])
    assert sum(param.numel() for param in model.parameters()) == 10**11


def test_ties_survive() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.rand(3))
            self.a = weight
            self.b = weight

    with init_empty_weights():
        model, twice = Model(), Twice()
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
    assert find_tied_parameters(twice) == [["a", "b"]]


def test_ties_survive_on_a_device_that_has_two_names() -> None:
    with init_on_device("cpu:0"):  # where it is, a tensor is on "cpu"
        assert find_tied_parameters(Model()) == [["embedding.weight", "head.weight"]]


def test_parameters_keep_class_attributes_and_flags() -> None:
    class Special(nn.Parameter):
        pass

    plain = nn.Parameter(torch.rand(2), requires_grad=False)
    plain.note = "kept"  # type: ignore[attr-defined]
    module = nn.Module()
    with init_on_device("meta"):
        module.register_parameter("plain", plain)
        module.register_parameter("special", Special(torch.rand(2)))
        module.register_parameter("none", None)
    assert module.plain.note == "kept"
    assert not module.plain.requires_grad
    assert type(module.special) is Special
    assert module.special.is_meta
    assert module.none is None


def test_an_error_inside_leaves_nothing_patched() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="inside"), init_empty_weights():
        raise RuntimeError("inside")
    assert nn.Module.register_parameter is before


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"LazyLinear\.weight is lazy"), init_empty_weights():
        nn.LazyLinear(3)


def test_the_same_device_leaves_parameters_as_they_are() -> None:
    with init_on_device(torch.device("cpu")):
        model = nn.Linear(2, 2)
    assert model.weight.device.type == "cpu"
