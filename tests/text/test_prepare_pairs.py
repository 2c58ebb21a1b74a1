"""Datasets of preferences: the counts of what is trained on are those of the batches."""

from __future__ import annotations

from typing import Any

import pytest
from tests.text.tokenizers import byte_tokenizer

from windlass.data.collate_preference import DataCollatorForPreference
from windlass.text.pair_encoder import PairOptions
from windlass.text.prepare_pairs import prepare_pairs, within

ROWS = [
    {"prompt": "a b c d e f", "chosen": " g h", "rejected": " i"},
    {"prompt": "a", "chosen": " b c d e f g h i", "rejected": " j k"},
    {"prompt": "a b", "chosen": " c", "rejected": " d e f"},
]


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
