"""Checksums of samples: the same in any process, and different for different samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.data.bookmark import checksum


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


class Picture:
    """Like an image of PIL: not an array, but with `tobytes`."""

    def __init__(self, pixels: bytes) -> None:
        self._pixels = pixels

    def tobytes(self) -> bytes:
        return self._pixels


@dataclass
class Row:
    x: torch.Tensor


def test_values_of_numpy_images_dataclasses_and_sparse_tensors_are_told_apart() -> None:
    # A stream of `datasets` in the format "numpy" returns the first, and streams of images the last but one: taken for
    # equal, the parts of a stream that splits itself would be dealt again.
    samples: list[Any] = [
        {"x": np.int64(1)}, {"x": np.int64(2)}, np.bool_(True), np.bool_(False),
        (Picture(b"one"), 0), (Picture(b"two"), 0), Row(torch.ones(1)), Row(torch.zeros(1)), bytearray(b"three"),
        torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse(), torch.eye(3).to_sparse_csr(),
        *(torch.nested.nested_tensor([x], layout=torch.jagged) for x in (torch.ones(2), torch.zeros(2))),
    ]  # fmt: skip
    marks = [checksum(sample) for sample in samples]
    assert len(set(marks)) == len(marks)


def test_an_array_of_objects_is_known_by_its_content() -> None:
    def words() -> np.ndarray[Any, Any]:
        return np.array([f"word {number}" for number in range(3)] + [np.arange(2)], dtype=object)

    kept = words()  # so that the second array has its objects at other addresses
    assert checksum(kept) == checksum(words())
    assert checksum(kept) != checksum(words()[1:])


class Node:
    def __init__(self, value: float) -> None:
        self.value, self.others = torch.tensor(value), [self]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


def test_objects_are_known_by_their_attributes_and_may_lead_in_a_circle() -> None:
    """Taken for equal, the parts of a stream of graphs that splits itself would be dealt again, and half of it lost."""
    assert checksum(Node(1.0)) == checksum(Node(1.0))
    assert checksum({"graph": Node(1.0)}) != checksum({"graph": Node(2.0)})
    assert checksum(Slotted(1.0)) != checksum(Slotted(2.0))
    shown = Path("a")
    before = checksum(shown), str(shown)  # the text is kept in the path
    assert before[0] == checksum(shown) != checksum(Path("b"))
