"""The denominator: how many targets a batch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.types import IGNORED
from windlass.metrics.tokens import InputCounter, TargetCounter, rows

labels = st.lists(
    st.lists(st.sampled_from([IGNORED, 0, 1, 5]), min_size=4, max_size=4), min_size=1, max_size=6
)


@given(table=labels, shifted=st.booleans(), cut=st.integers(0, 6))
def test_targets_are_counted_and_add_up(table: list[list[int]], shifted: bool, cut: int) -> None:
    counter = TargetCounter(shifted=shifted)
    expected = sum(value != IGNORED for row in table for value in row[int(shifted) :])
    assert counter({"labels": torch.tensor(table)}) == expected
    parts = [part for part in (table[:cut], table[cut:]) if part]
    assert sum(counter({"labels": torch.tensor(part)}) for part in parts) == expected, (
        "of the parts of a batch"
    )


@given(table=labels)
def test_labels_that_were_shifted_already_count_whole(table: list[list[int]]) -> None:
    batch = {"labels": torch.full((1, 4), IGNORED), "shift_labels": torch.tensor(table)}
    expected = sum(value != IGNORED for row in table for value in row)
    assert TargetCounter(shifted=True)(batch) == expected
    batch = {"labels": torch.tensor(table), "shift_labels": None}
    assert TargetCounter(shifted=True)(batch) == TargetCounter(shifted=True)({"labels": batch["labels"]})


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([0, 1, -100])}, 2),
        ({"labels": torch.tensor([[0.5, -100.0], [1.0, 2.0], [0.0, 0.0]])}, 3),
        ({"labels": torch.tensor(7.5)}, 1),
        ({"labels": None, "x": torch.zeros(5, 2)}, 5),
        ({"x": torch.zeros(5, 2)}, 5),
        ({"start": torch.tensor([1, 2]), "end": torch.tensor([3, 4])}, 2),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        (torch.zeros(4, 2), 4),
        ({"labels": torch.zeros(0, 4, dtype=torch.int64)}, 0),
        ({}, 1),
        (object(), 1),  # of an unknown kind: were it none, nothing would be learned, and nothing said
    ],
)
def test_what_is_no_table_of_classes_counts_rows(batch: Any, expected: int) -> None:
    names = ("start", "end") if isinstance(batch, dict) and "start" in batch else ("labels",)
    assert TargetCounter(names)(batch) == expected


def test_the_pixel_that_is_ignored_may_be_the_class_of_a_row() -> None:
    counter, labels = TargetCounter(ignored_pixel=255), torch.tensor([[255, 1], [7, 255]])
    assert counter({"labels": labels[None]}) == 2
    assert counter({"labels": labels}) == counter({"labels": labels.flatten()}) == 4


def test_rows_are_found_in_nested_batches() -> None:
    assert rows({"note": "text", "deep": {"x": torch.zeros(3, 1)}}) == 3
    assert rows((1, [torch.zeros(2)])) == 2
    assert rows("text") == rows(None) == rows({"a": 1}) == 0
    assert rows(torch.tensor(1.0)) == 1
    assert rows({"scale": torch.tensor(2.0), "x": torch.zeros(3, 1)}) == 3, "a number has no rows"
    assert rows({"images": torch.zeros(0, 8), "x": torch.zeros(3, 1)}) == 3


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_positions_with_and_without_padding(lengths: list[int]) -> None:
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    batch = {"input_ids": mask + 3, "attention_mask": mask}
    by_mask = InputCounter(tokens="non_padding")
    by_token = InputCounter(tokens="non_padding", pad_token_id=3)
    positions = 5 * len(lengths)
    assert by_mask(batch) == by_token({"input_ids": batch["input_ids"]}) == (sum(lengths), positions)
    assert by_mask({"input_ids": batch["input_ids"]}) == (positions, positions), (
        "no mask or pad: all are real"
    )
    assert by_mask({**batch, "attention_mask": mask.bfloat16()}) == by_mask(batch)
    between = mask[:, None, None, :].expand(-1, 1, 5, -1)  # which positions see which: no count of tokens
    assert by_token({**batch, "attention_mask": between}) == by_token({"input_ids": batch["input_ids"]})
    assert by_mask([1]) == by_mask({"x": mask}) == InputCounter()([1]) == (0, 0)
    assert InputCounter()(batch) == (positions, positions)
    assert InputCounter(tokens="no")(batch) == (0, positions)
