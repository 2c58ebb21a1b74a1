"""Models whose state dict is not their parameters and buffers alone: overrides, hooks, wrappers and extra state."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import write_parts
from torch import Tensor, nn

from windlass.checkpoint.export import ExportOptions, export_file
from windlass.checkpoint.split import save_split
from windlass.checkpoint.stored import load_folder, open_folder
from windlass.checkpoint.weights import load_weights, save_weights
from windlass.core.errors import CheckpointError
from windlass.core.module_state import bare, customizes_state, state_of
from windlass.core.world import World


class Copies(nn.Linear):
    """Takes no arguments, as scripts write it."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value.clone() for name, value in super().state_dict().items()}


class Turned(nn.Module):
    """Saves its weight in another layout and under another name, through hooks of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.inner.register_state_dict_post_hook(self._turn)
        self.inner.register_load_state_dict_pre_hook(self._turn_back)

    @staticmethod
    def _turn(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").T.contiguous()

    @staticmethod
    def _turn_back(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").T


class TiedCopies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        return type(found)((name, value.detach().clone()) for name, value in found.items())


class Loads(nn.Linear):
    """Its own loading derives what is not saved."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)  # type: ignore[no-untyped-call]
        self.total = float(self.weight.detach().sum())


class Extra(nn.Module):
    """Extra state of any kind, as layers in fp8 have it."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.rand(2)), value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Wrapped(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.block, self.last = Extra(value), nn.Linear(2, 2)


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


def patched() -> nn.Module:
    """A method of one object, which older scripts replace."""
    model = nn.Linear(3, 2)
    model.state_dict = lambda *_, **__: {"w": model.weight.clone(), "b": model.bias.clone()}  # type: ignore[method-assign]
    load = functools.partial(nn.Module.load_state_dict, model)
    model.load_state_dict = lambda state: load({"weight": state["w"], "bias": state["b"]})  # type: ignore[method-assign]
    return model


OWN = [lambda: Copies(3, 2), Turned, TiedCopies, lambda: Loads(3, 2), patched]
LAYOUTS: dict[str, Callable[[Path, Any], Any]] = {
    "one file": save_weights,
    "several files": lambda folder, state: save_split(folder, state, 8),
    "parts": lambda folder, state: write_parts(folder, "model", state, World()),
}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [*OWN, normed])
def test_weights_reach_the_parameters(build: Callable[[], nn.Module], layout: str, tmp_path: Path) -> None:
    model, other = build(), build()
    LAYOUTS[layout](tmp_path, state_of(model))
    load_folder(tmp_path, other)
    saved, loaded = parameters(model), parameters(other)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_what_derives_from_weights_is_derived_again(tmp_path: Path) -> None:
    save_weights(tmp_path, Loads(3, 2).state_dict())
    model = Loads(3, 2)
    load_weights(tmp_path, model)
    assert model.total == float(model.weight.detach().sum())


def test_a_compiled_model_is_loaded_by_the_one_inside(tmp_path: Path) -> None:
    model, other = Copies(3, 2), Copies(3, 2)
    save_weights(tmp_path, state_of(torch.compile(model)))  # type: ignore[arg-type]
    load_weights(tmp_path, torch.compile(other))  # type: ignore[arg-type]
    assert torch.equal(model.weight, other.weight)
    assert bare(torch.compile(other)) is other  # type: ignore[arg-type]


def test_modules_of_pytorch_are_loaded_in_place() -> None:
    """Its own hooks and overrides move no tensor: nothing needs room for a second model then."""
    plain = [
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, affine=True),
        nn.utils.spectral_norm(nn.Linear(2, 2)),
        normed(),
    ]
    assert not any(map(customizes_state, plain))
    assert all(map(customizes_state, [build() for build in OWN]))


class Forgetful(nn.Linear):
    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            self.bias.copy_(state["bias"])


def test_what_loading_leaves_out_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_weights(tmp_path, Forgetful(3, 2).state_dict())
    with pytest.raises(
        CheckpointError, match=r"1 entries of Forgetful.state_dict\(\) have other values .*: weight"
    ):
        load_weights(tmp_path, Forgetful(3, 2))


def test_a_refusal_of_the_model_is_reported(tmp_path: Path) -> None:
    class Refusing(Copies):
        def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
            raise KeyError("weight_v2")

    save_weights(tmp_path, Refusing(3, 2).state_dict())
    with pytest.raises(CheckpointError, match="load_state_dict of Refusing failed: KeyError: 'weight_v2'"):
        load_weights(tmp_path, Refusing(3, 2))


VALUES: dict[str, Any] = {
    "nothing": None,
    "plain": {"recipe": "delayed", "steps": [1, 2.5, None], "scale": float("inf"), 3: ("a", True)},
    "bytes": b"\x00\x01pickle",
    "no bytes": b"",
    "tensor": torch.arange(3, dtype=torch.uint8),
    "empty tensor": torch.empty(0),
    "nested": {"amax": torch.rand(4, 2), "blob": b"x", "deep": [{"scale": torch.tensor(2.0)}]},
    "complex": torch.rand(2, dtype=torch.complex128),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", VALUES)
def test_extra_state_comes_back(kind: str, layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path, state_of(Wrapped(VALUES[kind])))
    other = Wrapped({"before": torch.rand(7)})
    load_folder(tmp_path, other)
    expected = VALUES[kind]
    if isinstance(expected, Tensor):
        assert torch.equal(other.block.value, expected)
        assert other.block.value.dtype == expected.dtype
    elif kind == "nested":
        assert torch.equal(other.block.value["amax"], expected["amax"])
        assert other.block.value["blob"] == b"x"
        assert float(other.block.value["deep"][0]["scale"]) == 2.0
    else:
        assert other.block.value == expected
        assert type(other.block.value) is type(expected)


def test_values_survive_a_merge_of_parts(tmp_path: Path) -> None:
    model = Wrapped(VALUES["nested"])
    (tmp_path / "parts").mkdir()
    write_parts(tmp_path / "parts", "model", state_of(model), World())
    export_file(open_folder(tmp_path / "parts"), tmp_path / "whole.safetensors", ExportOptions())
    other = Wrapped()
    load_weights(tmp_path / "whole.safetensors", other)
    assert torch.equal(other.block.value["amax"], VALUES["nested"]["amax"])


def test_a_tensor_of_extra_state_keeps_its_name_for_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_weights(tmp_path, state_of(Wrapped(torch.ones(2))))
    assert set(load_file(tmp_path / "model.safetensors")) == {
        "block._extra_state", "block.weight", "last.bias", "last.weight"
    }  # fmt: skip
    save_weights(tmp_path, state_of(Wrapped({"a": torch.ones(2), "b": 1})))
    stored = load_file(tmp_path / "model.safetensors")
    assert json.loads(bytes(stored["block._extra_state#json"].tolist())) == {"a": {"$tensor": "a"}, "b": 1}
    assert "block._extra_state#tensors/a" in stored


def test_extra_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'block\._extra_state' is a dict: state 'a' is a builtins\.set"
    ):
        save_weights(tmp_path, state_of(Wrapped({"a": {1}})))


def test_extra_state_that_the_other_side_lacks_is_named(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    save_weights(tmp_path / "with", state_of(Wrapped(b"x")))
    plain = nn.Module()
    plain.block, plain.last = nn.Module(), nn.Linear(2, 2)
    plain.block.weight = nn.Parameter(torch.rand(2))
    with pytest.raises(CheckpointError, match=r"1 that the model does not have: block\._extra_state"):
        load_weights(tmp_path / "with", plain)
    save_weights(tmp_path / "without", plain.state_dict())
    with pytest.raises(CheckpointError, match=r"1 missing in the file: block\._extra_state"):
        load_weights(tmp_path / "without", Wrapped(b"x"))


def test_extra_state_that_is_not_taken_back_is_an_error(tmp_path: Path) -> None:
    class Deaf(Extra):
        def set_extra_state(self, state: Any) -> None:
            pass

    save_weights(tmp_path, state_of(Deaf({"n": 1})))
    with pytest.raises(CheckpointError, match="_extra_state has another value than was loaded"):
        load_weights(tmp_path, Deaf({"n": 2}))
    with pytest.raises(CheckpointError, match=r"set_extra_state of HalfMade \(_extra_state\) failed"):
        load_weights(tmp_path, HalfMade())


class HalfMade(nn.Module):
    """Defines one of the two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))

    def get_extra_state(self) -> Any:
        return {"n": 3}


def test_a_complex_tensor_of_double_precision_comes_back(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.rand(2, 3, dtype=torch.complex128))
        model.register_buffer("b", torch.rand(2, dtype=torch.complex64))
        return model

    model, other = build(), build()
    save_weights(tmp_path, state_of(model))
    load_weights(tmp_path, other)
    assert torch.equal(model.w, other.w)
    assert torch.equal(model.b, other.b)
