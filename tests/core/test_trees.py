"""Nests of tensors, beside the functions of the same names that scripts were written for."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import accelerate.utils as peer
import pytest
import torch
from tests.dist.same import assert_same
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from windlass.core import trees

Pair = namedtuple("Pair", "left right")
NEST = OrderedDict(
    a=torch.arange(6.0).reshape(2, 3),
    b=[Pair(torch.ones(2, dtype=torch.bfloat16), (torch.zeros(2, 2),)), "word", None],
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
    made = trees.initialize_tensors(trees.get_data_structure(TENSORS))
    assert trees.get_shape(made) == {"a": [3, 2], "b": [[3]]}
    assert made["b"][0].dtype == torch.float16
