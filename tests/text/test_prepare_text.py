from __future__ import annotations

import pytest
from tests.text.tokenizers import CHATML, byte_tokenizer

from windlass.core.errors import ConfigError, DataError
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions

CHAT = [{"role": "user", "content": "hé 😀"}, {"role": "assistant", "content": "Yes 😀"}]


def trained(row: dict[str, list[int]], tokenizer: object) -> str:
    """The text of the tokens that have a label."""
    assert [
        i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label not in (i, -100)
    ] == []
    return tokenizer.decode([label for label in row["labels"] if label != -100])  # type: ignore[attr-defined]


def test_lists_tables_and_streams_are_prepared_alike() -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer(CHATML)
    rows = [{"messages": CHAT, "id": n} for n in range(3)]
    table = datasets.Dataset.from_list(rows)
    options = TextOptions(assistant_only_loss=True)
    of_list, of_table, of_stream = (
        prepare_text(given, tokenizer, options) for given in (rows, table, table.to_iterable_dataset())
    )
    assert isinstance(of_table.dataset, datasets.Dataset)
    assert isinstance(of_stream.dataset, datasets.IterableDataset)
    assert of_table.dataset.column_names == of_list.dataset.column_names == ["input_ids", "labels"]
    assert list(of_list.dataset) == list(of_table.dataset) == list(of_stream.dataset)
    assert of_list.dataset[:]["labels"] == of_table.dataset[:]["labels"] == of_table.dataset["labels"][:]
    assert trained(of_list.dataset[0], tokenizer) == "Yes 😀<|im_end|>\n"
    assert of_list.summary == of_table.summary
    assert of_list.summary is not None
    assert of_list.summary.rows == 3


def test_rows_without_a_target_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "a" * 9, "completion": "b"}, {"prompt": "a", "completion": "b"}]
    found = prepare_text(rows, tokenizer, TextOptions(max_length=8))
    assert len(found.dataset) == 1
    assert found.summary is not None
    assert (found.summary.truncated, found.summary.dropped) == (1, 1)
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 1 of 2 rows, which have no token to train on"
    ]
    with pytest.raises(DataError, match="no row has a token to train on: 1 rows were dropped"):
        prepare_text(rows[:1], tokenizer, TextOptions(max_length=8))


def test_ends_of_rows_may_be_kept() -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "abcd", "completion": "xy"}]
    found = prepare_text(rows, tokenizer, TextOptions(max_length=4, truncation_mode="keep_end"))
    assert tokenizer.decode(found.dataset[0]["input_ids"]) == "dxy<eos>"
    assert trained(found.dataset[0], tokenizer) == "xy<eos>"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"a": 1, "b": 2}], {}, "found: a, b. Known forms:"),
        ([{"text": "a"}, {"text": None}], {}, "row 1: column 'text' is missing or null"),
        ([{"messages": CHAT}, {"messages": []}], {}, "row 1: messages is an empty conversation"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], {}, "row 0: messages.0. has the unknown role 'robot'"),
        ([{"text": "a"}, {"text": "abcdefghi"}], {"max_length": 4, "truncation_mode": "error"},
         "row 1: has 10 tokens, more than max_length=4"),
        ([{"messages": CHAT}, {"messages": CHAT[:1]}], {"assistant_only_loss": True},
         "row 1: assistant_only_loss=True, and the chat template marks no token"),
        ([], {}, "the dataset has no rows"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "row 0: labels has 1 values, input_ids 2"),
        ([{"prompt": "a", "completion": CHAT}], {}, "row 0: prompt and completion must both be text"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_with_their_number(rows: list[dict], options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(DataError, match=message):
        prepare_text(rows, byte_tokenizer(CHATML), TextOptions(**options))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], {"assistant_only_loss": True}, "needs conversations"),
        ([{"text": "a"}], {"completion_only_loss": True}, "needs rows with a prompt and a completion"),
        ([{"input_ids": [1]}], {"completion_only_loss": True}, "needs a column completion_mask or labels"),
        ([{"input_ids": [1]}], {"assistant_only_loss": True}, "needs a column assistant_masks or labels"),
    ],
)  # fmt: skip
def test_options_that_do_not_apply_are_refused(rows: list[dict], options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=message):
        prepare_text(rows, byte_tokenizer(), TextOptions(**options))


def test_a_tokenizer_without_template_or_end_token_is_refused() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match="has no chat template"):
        prepare_text([{"messages": CHAT}], tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        prepare_text([{"text": "a"}], tokenizer)
