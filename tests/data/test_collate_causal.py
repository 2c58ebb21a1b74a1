"""Padded and padding-free batches, compared with the collator of trl that scripts know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.core.errors import ConfigError, DataError
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.data.collate_flatten import DataCollatorWithFlattening

PLAIN = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
MASKED = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, -100]}]
PACKED = [
    {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [2, 1]},
    {"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7], "seq_lengths": [1, 3]},
]


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name
            assert ours[name].dtype == value.dtype, name
        else:
            assert ours[name] == value, name


_OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_free": True},
    {"pad_to_multiple_of": 8},
    {"return_position_ids": True},
]


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        *((samples, options) for samples in (PLAIN, MASKED) for options in _OPTIONS),
        *((PACKED, options) for options in _OPTIONS[:3]),
    ],
    ids=str,
)
def test_batches_are_those_of_trl(samples: Any, options: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    _same(
        DataCollatorForCausalLM(pad_token_id=9, **options)(samples),
        trl.DataCollatorForLanguageModeling(pad_token_id=9, **options)(samples),
    )


def test_packed_rows_with_positions_have_no_mask() -> None:
    """With TRL's mask, attention would join their documents, and the first token of each would be a target."""
    batch = DataCollatorForCausalLM(pad_token_id=9, return_position_ids=True)(PACKED)
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 2, -100, -100], [-100, -100, 6, 7]]


def test_padding_of_one_row_is_a_document() -> None:
    batch = DataCollatorForCausalLM(pad_token_id=9, padding_free=True, pad_to_multiple_of=8)(PLAIN)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]


def test_the_samples_keep_their_labels() -> None:
    labels = torch.tensor([1, 2]).numpy()
    DataCollatorForCausalLM(pad_token_id=0, padding_free=True)([{"input_ids": [1, 2], "labels": labels}])
    assert labels.tolist() == [1, 2]


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(DataError, match="3 tokens has seq_lengths"):
        DataCollatorForCausalLM(pad_token_id=0)([{"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}])


def test_a_multiple_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="pad_to_multiple_of=0"):
        DataCollatorForCausalLM(pad_token_id=0, pad_to_multiple_of=0)


@pytest.mark.parametrize("kind", [DataCollatorForCausalLM, DataCollatorWithFlattening])
def test_tokens_that_are_not_attended_are_no_part_of_a_joined_row(kind: Any) -> None:
    collator = kind(0, padding_free=True) if kind is DataCollatorForCausalLM else kind()
    padded = [
        {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]},
        {"input_ids": [7, 8, 0], "labels": [1, 2, 3], "attention_mask": [1, 1, 0]},
    ]
    bare = [{"input_ids": [5, 6]}, {"input_ids": [7, 8], "labels": [1, 2]}]
    found, expected = collator(padded), collator(bare)
    assert found.keys() == expected.keys()
    assert all(
        found[name].tolist() == expected[name].tolist() for name in ("input_ids", "labels", "position_ids")
    )
