"""Pairs in one row: what each answer sees and is predicted from is what it is in a padded batch."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.data.collate_branches import DataCollatorForSharedPrompts
from windlass.data.collate_preference import DataCollatorForPreference

PAIRS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, 11, 12], "margin": 0.5},
    {"prompt_ids": [4], "chosen_ids": [3, 2, 1], "rejected_ids": [9], "margin": 1.0},
    {"prompt_ids": [], "chosen_ids": [6, 5], "rejected_ids": [7, 8, 9], "margin": 2.0},
]


def sequences(batch: Any) -> list[tuple[list[int], list[int]]]:
    """Of each answer, the chosen ones first: the tokens and positions that it sees, and what is predicted where."""
    ids, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
    found, start = [], 0
    for prefix, *branches in batch["groups"]:
        shared, start = list(range(start, start + prefix)), start + prefix
        for branch in branches:
            places = [*shared, *range(start, start + branch)]
            assert [positions[at] for at in places] == list(range(len(places)))
            found.append((places, [ids[at] for at in places]))
            start += branch
    assert start == len(ids)
    return found


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_an_answer_is_what_it_is_in_a_padded_batch(shares: bool, most: int | None, mode: str) -> None:
    padded = DataCollatorForPreference(0, most, mode)(PAIRS)
    batch = DataCollatorForSharedPrompts(0, most, mode, shares_prompts=shares)(PAIRS)
    count = len(PAIRS)
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    for at, number in enumerate(order):
        places, ids = sequences(batch)[number]
        length = int(padded["attention_mask"][at].sum())
        assert ids == padded["input_ids"][at, :length].tolist()
        assert int(batch["sequence_lengths"][at]) == length
        kept = batch["answer_mask"][at] > 0
        predicting = [places.index(place) for place in batch["answer_places"][at][kept].tolist()]
        wanted = padded["completion_mask"][at, 1:].nonzero().flatten().tolist()
        assert predicting == wanted
        for place in batch["answer_places"][at][kept].tolist():
            assert batch["completion_mask"][0, place + 1] == 1
    assert int(batch["completion_mask"].sum()) == int(padded["completion_mask"][:, 1:].sum())
    assert batch["margin"].tolist() == [0.5, 1.0, 2.0]


def test_a_prompt_is_in_the_row_once() -> None:
    batch = DataCollatorForSharedPrompts(0)(PAIRS)
    assert batch["groups"] == [[2, 3, 4], [0, 4, 2], [0, 2, 3]]
    assert batch["input_ids"].tolist()[0][:9] == [5, 6, 7, 8, 9, 7, 10, 11, 12]


def test_a_row_is_filled_by_a_document_of_its_own() -> None:
    batch = DataCollatorForSharedPrompts(99, pad_to_multiple_of=8)(PAIRS)
    assert batch["input_ids"].shape == (1, 24)
    assert batch["groups"][-1] == [0, 4]
    assert batch["input_ids"][0, -4:].tolist() == [99] * 4
    assert batch["answer_places"].shape == (6, 3)
    assert int(batch["completion_mask"][0, -4:].sum()) == 0
