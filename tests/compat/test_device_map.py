"""Device maps as data: looked up, checked, cleaned and made flat."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from accelerate.utils import modeling as reference
from tests.compat.big_models import Model
from tests.versions import needs
from transformers.integrations import accelerate as transformers_reference

from windlass.compat.big_models.auto_device_map import (
    check_and_set_device_map,
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    lookup,
    without_nesting,
)
from windlass.core.errors import ConfigError

MAP = {
    "embedding": 0,
    "position": "cpu",
    "blocks.0": "disk",
    "blocks.1": 1,
    "blocks.2": 1,
    "norm": 0,
    "head": 0,
}


@pytest.fixture(autouse=True)
def _propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)


def test_places_of_tensors_are_those_of_the_reference() -> None:
    names = list(Model().state_dict())
    assert {name: lookup(MAP, name) for name in names} == transformers_reference.expand_device_map(MAP, names)
    assert lookup({"": "disk"}, "x.y") == "disk"
    assert lookup({"blocks": 0}, "x.y") is None


def test_a_name_is_no_prefix_of_another_by_letters_alone() -> None:
    assert lookup({"h.1": 0, "h": 1}, "h.10.w") == 1
    assert lookup({"h.1": 0, "h": 1}, "h.1.w") == 0


@pytest.mark.parametrize("given", ["auto", "sequential", None, {"": 0}, 0, "cpu", torch.device("cpu")])
def test_arguments_in_one_form(given: object) -> None:
    expected = transformers_reference.check_and_set_device_map(given)  # type: ignore[arg-type]
    assert check_and_set_device_map(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["automatic", -1])
def test_arguments_that_mean_nothing(given: object) -> None:
    with pytest.raises(ConfigError, match="device_map"):
        check_and_set_device_map(given)  # type: ignore[arg-type]


def test_a_map_must_cover_the_model() -> None:
    check_device_map(Model(), MAP)
    check_device_map(Model(), {"": 0})
    with pytest.raises(ConfigError, match=r"no place for norm\.weight, norm\.bias"):
        check_device_map(Model(), {key: place for key, place in MAP.items() if key != "norm"})


@needs("accelerate", "1.10", "older ones do not warn")
def test_strangers_in_a_map_are_a_warning_as_in_the_peer() -> None:
    for check in (check_device_map, reference.check_device_map):
        with pytest.warns(UserWarning, match="nose") as caught:
            check(Model(), {**MAP, "nose": 0})
        told = [str(w.message) for w in caught]
        assert check is not check_device_map or "position" not in told[0], "a parameter is a name too"


def test_a_buffer_outside_of_the_state_dict_is_a_name_too(recwarn: pytest.WarningsRecorder) -> None:
    """`infer_auto_device_map` places the buffers of modules that it splits."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.zeros(2), persistent=False)
    check_device_map(model, {"0": "cpu", "mask": "cpu"})
    assert not recwarn.list


def test_each_name_of_a_shared_module_is_one_of_the_model(recwarn: pytest.WarningsRecorder) -> None:
    model = Model()
    model.again = model.norm
    check_device_map(model, {**MAP, "again": 0})
    assert not recwarn.list


def test_ties_over_devices_are_said(caplog: pytest.LogCaptureFixture) -> None:
    ties = [["embedding.weight", "head.weight"]]
    check_tied_parameters_on_same_device(ties, MAP)
    assert not caplog.text
    check_tied_parameters_on_same_device(ties, {**MAP, "head": 1})
    assert "head.weight" in caplog.text
    with pytest.raises(ConfigError, match=r"head\.weight"):
        check_tied_parameters_on_same_device(ties, {"embedding": 0})


@pytest.mark.parametrize(
    "places", [[0] * 5, [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 2, 3, 4], ["cpu"] * 4 + [0]]
)
def test_cleaning_is_that_of_the_reference(places: list) -> None:
    names = ["a.b.c", "a.b.d", "a.e", "f.g", "f.h"]
    found = dict(zip(names, places, strict=True))
    assert clean_device_map(copy.copy(found)) == reference.clean_device_map(copy.copy(found))


def test_an_entry_inside_another_takes_its_part_out() -> None:
    model = Model(layers=2)
    flat = without_nesting(model, {"": 0, "blocks.1": "cpu", "nose": 3})
    assert flat == {
        "embedding": 0, "position": 0, "norm": 0, "head": 0, "blocks.0": 0, "blocks.1": "cpu",
    }  # fmt: skip
    assert without_nesting(model, {"": 0}) == {"": 0}
    inner = without_nesting(model, {"": "cpu", "blocks.0": "disk", "blocks.0.inner.0": 0})
    assert inner["blocks.0.inner.0"] == 0
    assert inner["blocks.0.scale"] == inner["blocks.0.shift"] == inner["blocks.0.inner.2"] == "disk"
    assert inner["blocks.1"] == "cpu"
