"""Device maps found by filling devices, compared with accelerate's on many random models."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from accelerate.utils import modeling as reference
from tests.compat.big_models import Model, RandomModel
from torch import nn

from windlass.compat.big_models.auto_device_map import (
    check_device_map,
    get_module_size_with_ties,
    infer_auto_device_map,
    lookup,
)
from windlass.compat.big_models.device_memory import compute_module_sizes, get_balanced_memory


def _case(seed: int) -> tuple[RandomModel, dict, dict]:
    rng = random.Random(seed)
    model = RandomModel(rng)
    total = compute_module_sizes(model)[""]
    room: dict = {index: int(total * rng.uniform(0, 0.9)) for index in range(rng.randint(0, 3))}
    if rng.random() < 0.8 or not room:
        room["cpu"] = int(total * rng.uniform(0, 1.2))
    if rng.random() < 0.4:
        room = dict(get_balanced_memory(model, room, low_zero=rng.random() < 0.3))
    options = {
        "no_split_module_classes": rng.choice([None, ["RandomBlock"], "RandomBlock"]),
        "dtype": rng.choice([None, torch.float16, "float16"]),
        "fallback_allocation": rng.random() < 0.4,
        "offload_buffers": rng.random() < 0.5,
        "clean_result": rng.random() < 0.7,
    }
    return model, room, options


def _used(model: RandomModel, found: Mapping, dtype: object) -> dict:
    """Bytes that a map puts on each device; None for what it forgets."""
    sizes = compute_module_sizes(model, dtype)  # type: ignore[arg-type]
    used: dict = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        place = lookup(found, name)
        used[place] = used.get(place, 0) + sizes[name]
    return used


def _fits(used: dict, room: dict) -> bool:
    return all(place == "disk" or (place is not None and size <= room[place]) for place, size in used.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 600, 100))
def test_maps_are_those_of_the_reference_and_fit_where_those_do_not(start: int) -> None:
    """The reference fails on some ties, forgets the buffers of modules that it splits, and may overfill by them."""
    compared = 0
    for seed in range(start, start + 100):
        model, room, options = _case(seed)
        found = infer_auto_device_map(model, dict(room), **options)
        check_device_map(model, found)
        assert _fits(_used(model, found, options["dtype"]), room), (seed, found)
        try:
            expected = reference.infer_auto_device_map(model, dict(room), **options)
        except IndexError:
            continue
        if _fits(_used(model, expected, options["dtype"]), room):
            assert found == dict(expected), (seed, room, options)
            compared += 1
    assert compared > 80


@pytest.mark.filterwarnings("ignore:the buffers of offloaded layers")
def test_ties_that_the_reference_cannot_place() -> None:
    """A tied parameter that stands alone, because its module was split, is placed with its twin."""
    model = Model()
    model.position = model.blocks[0].scale
    found = infer_auto_device_map(model, {0: 300, "cpu": 10_000}, clean_result=False)
    check_device_map(model, found)
    assert lookup(found, "position") == lookup(found, "blocks.0.scale")


def test_buffers_that_fit_nowhere_are_a_warning_as_in_the_peer() -> None:
    for infer in (infer_auto_device_map, reference.infer_auto_device_map):
        with pytest.warns(UserWarning, match="offload_buffers=True"):
            infer(Model(), {0: 300, "cpu": 10_000})


def test_each_decision_is_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(Model(), {"cpu": 1500}, verbose=True)
    printed = capsys.readouterr().out
    assert "embedding (396 bytes) goes to cpu" in printed
    assert "on to the next device" in printed
    infer_auto_device_map(Model(), {"cpu": 1500})
    assert not capsys.readouterr().out


def test_a_module_with_two_ties_into_one_counts_it_once() -> None:
    layer = torch.nn.Linear(2, 2)
    sizes = {"b": 24, "b.weight": 16, "b.bias": 8}
    size, names, modules = get_module_size_with_ties(["b.weight", "b.bias"], 24, sizes, [("b", layer)])
    assert (size, names, modules) == (24, ["b"], [layer])


def test_a_buffer_goes_to_the_other_parts_of_its_module_alone() -> None:
    inner = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    inner.register_buffer("mask", torch.zeros(4))
    # The name of the second begins like that of the first.
    model = nn.ModuleDict({"layer10": nn.Linear(10, 10, bias=False), "layer1": inner})
    found = infer_auto_device_map(model, {"cpu": 900}, clean_result=False)
    assert (found["layer10"], found["layer1.0"], found["layer1.mask"]) == ("cpu", "disk", "disk")
