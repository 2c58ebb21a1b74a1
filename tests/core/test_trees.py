"""Nests of tensors, beside the functions of the same names that scripts were written for."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import accelerate.utils as peer
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dist.same import assert_same
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from windlass.core import trees

Pair = namedtuple("Pair", "left right")
NEST = OrderedDict(
    a=torch.arange(6.0).reshape(2, 3),
    b=[Pair(torch.ones(2, dtype=torch.bfloat16), (torch.zeros(2, 2),)), "word", None],
)
LEAVES = st.none() | st.integers(-5, 5).map(torch.tensor)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
TENSORS = {"a": torch.ones(3, 2), "b": [torch.zeros(3, dtype=torch.float16)]}


@pytest.mark.parametrize(
    "name",
    ["listify", "convert_to_fp32", "get_data_structure", "find_batch_size", "find_device", "is_namedtuple"],
)
def test_as_the_peer_does(name: str) -> None:
    wanted = getattr(peer, name)(NEST)
    found = getattr(trees, name)(NEST)
    if name == "get_data_structure":
        assert [(i.shape, i.dtype) for i in (found["a"], found["b"][0].left)] == [
            (i.shape, i.dtype) for i in (wanted["a"], wanted["b"][0].left)
        ]
    else:
        assert_same(found, wanted)


def test_slices_and_joins() -> None:
    assert_same(trees.slice_tensors(NEST, slice(0, 1)), peer.slice_tensors(NEST, slice(0, 1)))
    assert_same(trees.concatenate([TENSORS, TENSORS]), peer.concatenate([TENSORS, TENSORS]))
    assert_same(trees.concatenate([TENSORS["a"]] * 2, dim=1), torch.cat([TENSORS["a"]] * 2, dim=1))
    assert trees.concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="found a str"):
        trees.concatenate(["a", "b"])


@pytest.mark.parametrize(("batch", "processes", "length"), [(3, 4, 4), (5, 2, 6), (8, 2, 8), (1, 3, 3)])
def test_padding_repeats_the_last_sample(batch: int, processes: int, length: int) -> None:
    padded = trees.pad_input_tensors({"a": torch.arange(batch)[:, None]}, batch, processes)["a"]
    assert padded.shape == (length, 1)
    assert padded[batch:].eq(batch - 1).all()
    assert torch.equal(padded[:batch, 0], torch.arange(batch))


def test_leaves_that_are_no_tensors() -> None:
    assert trees.recursively_apply(lambda t: t + 1, {"a": "word"}) == {"a": "word"}
    with pytest.raises(TypeError, match="given a str"):
        trees.recursively_apply(torch.neg, {"a": "word"}, error_on_other_type=True)
    assert trees.recursively_apply(lambda n, by: n * by, [1, 2], 3, test_type=lambda n: n == 2) == [1, 6]


@pytest.mark.parametrize("empty", [[], {}, ()])
def test_an_empty_batch_has_no_size(empty: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        trees.find_batch_size(empty)
    assert trees.ignorant_find_batch_size(empty) is None
    assert trees.ignorant_find_batch_size(["word"]) is None


def test_moving_skips_keys_and_takes_whatever_moves() -> None:
    class Batch:
        def to(self, device: str) -> str:
            return f"moved to {device}"

    moved = trees.send_to_device(
        {"x": torch.ones(1), "keep": torch.ones(1), "own": [Batch()]}, "meta", skip_keys="keep"
    )
    assert (moved["x"].device.type, moved["keep"].device.type) == ("meta", "cpu")
    assert moved["own"] == ["moved to meta"]
    noted = trees.send_to_device(
        {"words": "kept", "text": BatchEncoding({"x": torch.zeros(2)}), "n": 3}, "meta"
    )
    assert (noted["words"], noted["n"], type(noted["text"])) == ("kept", 3, BatchEncoding)
    assert noted["text"]["x"].device.type == "meta"


def test_maps_stay_what_they_are() -> None:
    counted = defaultdict(list, x=torch.ones(1, dtype=torch.float16))
    widened = trees.convert_to_fp32(counted)
    assert widened["x"].dtype == torch.float32
    assert widened["new"] == []
    tokens = BatchEncoding({"input_ids": torch.ones(2, 3)})
    moved = trees.send_to_device([tokens, trees.slice_tensors(tokens, slice(1))], "meta")
    assert type(moved[1]) is BatchEncoding
    assert moved[1].input_ids.shape == (1, 3)
    output = SequenceClassifierOutput(loss=torch.ones(()), logits=torch.ones(2, dtype=torch.bfloat16))
    assert trees.convert_to_fp32(output).logits.dtype == torch.float32


def test_room_for_described_tensors() -> None:
    described = trees.get_data_structure({**TENSORS, "loss": torch.tensor(1.0)})
    made = trees.initialize_tensors(described)
    assert trees.get_shape(made) == {"a": [3, 2], "b": [[3]], "loss": []}
    assert made["b"][0].dtype == torch.float16


class Noted(dict[str, Any]):
    """A dict whose constructor takes something else, with an attribute of its own."""

    def __init__(self, note: str, size: int) -> None:
        super().__init__()
        self.note, self.size = note, size


class Frozen(Mapping[str, Any]):
    def __init__(self, names: list[str], values: list[Any]) -> None:
        self._items = dict(zip(names, values, strict=True))

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Padded(list[Any]):
    def __init__(self, items: list[Any], padding: int) -> None:
        super().__init__(items)
        self.padding = padding


def test_containers_stay_what_they_are() -> None:
    batch = OrderedDict(x=Pair(torch.zeros(2), [torch.ones(2), "text"]), y=(1, torch.zeros(1)))
    changed = trees.map_leaves(lambda tensor: tensor + 1, batch)
    assert type(changed) is OrderedDict
    assert type(changed["x"]) is Pair
    assert type(changed["y"]) is tuple
    assert changed["x"].right[1] == "text"
    assert changed["y"][1].tolist() == [1.0]
    assert batch["y"][1].tolist() == [0.0]


def test_a_dict_of_its_own_kind_keeps_its_attributes() -> None:
    noted = Noted("from the script", 2)
    noted["x"] = torch.zeros(2)
    changed = trees.map_leaves(lambda tensor: tensor + 1, noted)
    assert (type(changed), changed.note, changed.size) == (Noted, "from the script", 2)
    assert (changed["x"].tolist(), noted["x"].tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_a_container_that_cannot_be_built_from_its_items_becomes_a_plain_one() -> None:
    nest = [Frozen(["x"], [torch.zeros(1)]), Padded([torch.zeros(1)], 3), torch.Size([2])]
    changed = trees.map_leaves(lambda tensor: tensor + 1, nest)
    assert changed == [{"x": torch.ones(1)}, [torch.ones(1)], torch.Size([2])]
    assert [type(part) for part in changed] == [dict, list, torch.Size]


def test_an_error_of_a_change_is_not_taken_for_one_of_a_container() -> None:
    with pytest.raises(TypeError, match="mine"):
        trees.map_leaves(lambda tensor: (_ for _ in ()).throw(TypeError("mine")), [torch.zeros(1)])


@given(NESTS)
def test_a_nest_survives_the_way_through_json(nest: Any) -> None:
    spec, found = trees.flatten(nest, lambda leaf, path: leaf)
    assert trees.unflatten(json.loads(json.dumps(spec)), found) == nest
    assert trees.flatten(trees.unflatten(spec, found), lambda leaf, path: leaf)[0] == spec


def test_a_flattened_leaf_is_known_by_its_place() -> None:
    assert trees.flatten({"a": (1, [2])}, lambda leaf, path: f"{path}={leaf}")[1] == [
        "['a'][0]=1",
        "['a'][1][0]=2",
    ]


def test_tensors_are_found_in_order() -> None:
    assert [tensor.dtype for tensor in trees.tensors_in(NEST)] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]


def test_the_batch_size_is_that_of_the_first_tensor_with_an_axis() -> None:
    assert trees.batch_size_of({"t": "text", "s": torch.tensor(1), "x": [torch.zeros(3, 2)]}) == 3
    assert trees.batch_size_of({"flag": True, "ids": np.zeros(7), "x": [torch.ones(4, 2)]}) == 4
    assert trees.batch_size_of({"flag": True, "n": torch.tensor(3), "x": [np.ones((5, 2))]}) == 5
    assert trees.batch_size_of({"flag": True, "s": torch.tensor(1)}) is None


def test_detached_nests_hold_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    nest = trees.detach({"a": Pair(weight * 2, "text")})
    assert not nest["a"].left.requires_grad
    assert nest["a"].right == "text"
