"""Nests of tensors: sizes, places, checksums."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding

from windlass.data.nested import batch_size_of, checksum, map_leaves, move

Pair = namedtuple("Pair", ["a", "b"])


def test_containers_stay_what_they_are() -> None:
    batch = OrderedDict(x=Pair(torch.zeros(2), [torch.ones(2), "text"]), y=(1, torch.zeros(1)))
    changed = map_leaves(batch, lambda tensor: tensor + 1, "none")
    assert type(changed) is OrderedDict
    assert type(changed["x"]) is Pair
    assert type(changed["y"]) is tuple
    assert changed["x"].b[1] == "text"
    assert changed["y"][1].tolist() == [1.0]
    assert batch["y"][1].tolist() == [0.0]


def test_the_first_axis_of_the_first_tensor_is_the_size() -> None:
    assert batch_size_of({"t": "text", "s": torch.tensor(1), "x": [torch.zeros(3, 2)]}) == 3
    assert batch_size_of({"t": "text", "s": torch.tensor(1)}) is None


def test_a_batch_type_of_its_own_moves_itself() -> None:
    class Graph:
        def to(self, device: Any) -> str:
            return f"moved to {device}"

    meta = torch.device("meta")
    encoding = BatchEncoding({"x": torch.zeros(2)})
    moved = move({"graph": Graph(), "text": encoding, "n": 3}, meta)
    assert moved["graph"] == "moved to meta"
    assert moved["n"] == 3
    assert type(moved["text"]) is BatchEncoding
    assert moved["text"]["x"].device == meta


def test_checksums_tell_samples_apart_and_know_no_addresses() -> None:
    samples: list[Any] = [
        {"x": torch.arange(3)}, {"x": torch.arange(3) + 1}, {"y": torch.arange(3)}, np.arange(3.0), np.arange(4.0),
        "text", b"text", 1, 1.5, None, (1, "a"), (2, "a"),
    ]  # fmt: skip
    marks = [checksum(sample) for sample in samples]
    assert len(set(marks)) == len(marks)
    assert checksum(object()) == checksum(object())
    assert checksum(torch.tensor(1.5, dtype=torch.bfloat16)) == checksum(
        torch.tensor(1.5, dtype=torch.bfloat16)
    )
