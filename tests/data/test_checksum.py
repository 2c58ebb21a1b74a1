"""Checksums of samples: the same in any process, and different for different samples."""

from __future__ import annotations

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
