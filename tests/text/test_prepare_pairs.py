"""Datasets of preferences: the counts of what is trained on are those of the batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.text.tokenizers import byte_tokenizer

from windlass.core.errors import DataError
from windlass.data.collate_preference import DataCollatorForPreference
from windlass.text.pair_encoder import PairOptions, split_prompt
from windlass.text.prepare_pairs import prepare_pairs, within

ROWS = [
    {"prompt": "a b c d e f", "chosen": " g h", "rejected": " i"},
    {"prompt": "a", "chosen": " b c d e f g h i", "rejected": " j k"},
    {"prompt": "a b", "chosen": " c", "rejected": " d e f"},
]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue", "The sky is green", "The sky is"),  # the space is of the answers
        ("Say no", "Say no more", "Say n"),  # of each answer something is left
        ("Yes", "No", ""),
    ],
)
def test_a_prompt_is_what_both_answers_begin_with(chosen: str, rejected: str, prompt: str) -> None:
    found, answers = split_prompt({}, [chosen, rejected], 0)
    assert found == prompt
    assert [found + answer for answer in answers] == [chosen, rejected]
    assert all(answers)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lost", [{"prompt": None}, {}], ids=["null", "missing"])
def test_a_prompt_that_a_row_lacks_is_refused_beside_texts(lost: dict[str, Any], whole: bool) -> None:
    """`datasets` fills in null where a row of a file has none."""
    row = {"chosen": " b c", "rejected": " d", **lost}
    with pytest.raises(DataError, match="row 1: column 'prompt' is missing or null: give each row a prompt"):
        prepare_pairs([ROWS[0], row], byte_tokenizer(), PairOptions(whole=whole))


def test_rows_are_found_by_number_from_both_ends() -> None:
    rows = prepare_pairs(ROWS, byte_tokenizer(), PairOptions())
    assert [rows[at] for at in (-3, -2, -1)] == list(rows) == list(rows[:])
    for at in (3, -4):
        with pytest.raises(IndexError, match=f"row {at} of 3"):
            rows[at]


def test_an_empty_answer_is_its_end_token() -> None:
    """Also of a tokenizer that puts that token after every text, a prompt alone included."""
    from tokenizers.processors import TemplateProcessing

    plain, ending = byte_tokenizer(), byte_tokenizer()
    end = ("<eos>", plain.eos_token_id)
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[end])
    options, row = PairOptions(answers=("completion",)), {"prompt": "Say nothing.", "completion": ""}
    for tokenizer in (plain, ending):
        found = prepare_pairs([row], tokenizer, options)[0]
        assert found["completion_ids"] == [plain.eos_token_id]
        assert plain.decode(found["prompt_ids"]) == "Say nothing."


def test_a_label_is_true_or_false() -> None:
    rows = [{"prompt": "a", "completion": " b", "label": label} for label in (True, False, 1, 0.0, -1)]
    options = PairOptions(answers=("completion",))
    with pytest.raises(
        DataError, match=r"row 4: column 'label' holds -1, and must be true \(1\) or false \(0\)"
    ):
        prepare_pairs(rows, byte_tokenizer(), options, numbers=("label",))
    found = prepare_pairs(rows[:4], byte_tokenizer(), options, numbers=("label",))
    assert [bool(label) for label in found["label"]] == [True, False, True, False]


def test_numbers_of_some_rows_alone_are_refused() -> None:
    for rows in ([ROWS[0], {**ROWS[1], "margin": 1}], [{**ROWS[0], "margin": 1}, ROWS[1]]):
        with pytest.raises(DataError, match=r"row \d: column 'margin' is missing or null"):
            prepare_pairs(rows, byte_tokenizer(), PairOptions(), numbers=("margin",))


@pytest.mark.parametrize("margin", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_refused(margin: float) -> None:
    rows = [{**ROWS[0], "margin": 1}, {**ROWS[1], "margin": margin}]
    with pytest.raises(
        DataError, match=f"row 1: column 'margin' holds {margin}, which is not a finite number"
    ):
        prepare_pairs(rows, byte_tokenizer(), PairOptions(), numbers=("margin",))
    rows[1]["margin"] = 10**30
    with pytest.raises(DataError, match="row 1: column 'margin' holds a whole number of more than 64 bits"):
        prepare_pairs(rows, byte_tokenizer(), PairOptions(), numbers=("margin",))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("most", [5, 9, 12, 15, 18, None])
def test_the_counts_are_those_of_batches(mode: str, most: int | None) -> None:
    options = PairOptions(max_length=most, truncation_mode=mode)
    rows, found = within(prepare_pairs(ROWS, byte_tokenizer(), options), options, "train", ROWS)
    batch = DataCollatorForPreference(0, most, mode)([*rows])
    sizes: Any = batch["attention_mask"].sum(1)
    trained = int(batch["completion_mask"].sum())
    assert (found.rows, found.tokens, found.trained_tokens) == (len(rows), int(sizes.sum()), trained)
    assert found.longest == int(sizes.max())
