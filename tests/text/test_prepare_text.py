from __future__ import annotations

from pathlib import Path

import pytest
from tests.text.tokenizers import CHATML, TEMPLATES, byte_tokenizer

from windlass.core.errors import ConfigError, DataError
from windlass.core.types import IGNORED
from windlass.text.packing import pack_dataset
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions

CHAT = [{"role": "user", "content": "hé 😀"}, {"role": "assistant", "content": "Yes 😀"}]


def trained(row: dict[str, list[int]], tokenizer: object) -> str:
    """The text of the tokens that have a label."""
    assert [
        i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label not in (i, -100)
    ] == []
    return tokenizer.decode([label for label in row["labels"] if label != -100])  # type: ignore[attr-defined]


def said(content: object) -> dict[str, list[dict[str, object]]]:
    """A conversation in which the user's message has this content."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]}


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
        "dropped 1 of 2 rows, which have no token to train on: row 0"
    ]
    with pytest.raises(DataError, match=r"1 rows were dropped, .* Raise max_length, or check the masks"):
        prepare_text(rows[:1], tokenizer, TextOptions(max_length=8))


def test_a_system_message_that_no_form_reads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    prepare_text([{**said("Is it?"), "system": "Be brief."}], byte_tokenizer(CHATML), TextOptions())
    assert "the column 'system' is not read beside messages" in caplog.text


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
        ([{"prompt": "a", "completion": "b"}, {"prompt": "c"}], {}, "row 1: column 'completion' is missing"),
        ([{"text": "a"}, "b"], {}, "row 1: must be a mapping of columns, not str"),
        ([{"text": "a\ud83d"}], {}, "row 0: column 'text' holds .* at character 1, half of a surrogate pair"),
        ([{"instruction": "a", "output": "b", "input": [1]}], {}, "row 0: column 'input' must hold text, not list"),
        ([said(None)], {}, r"row 0: messages\[0\] \(user\) has no content"),
        ([said(5)], {}, r"row 0: the content of messages\[0\] \(user\) must be text, not int"),
        ([said([{"type": "image"}])], {}, "has a part of type 'image', and images need a processor"),
        ([said(["x"])], {}, "has a part of type 'str'"),
        ([{"messages": CHAT, "tools": {"a": 1}}], {}, "row 0: column 'tools' must hold a list, or its JSON, not dict"),
        ([{"messages": CHAT, "chat_template_kwargs": "x"}], {}, "must hold a mapping, not str"),
        ([{"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}], {}, "chat_template_kwargs has 'tokenize'"),
        ([{"input_ids": [1, 2], "assistant_masks": [0, 0]}], {}, "row 0: its assistant_masks mark no token"),
        ([{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [1, 2]}], {}, "row 1: labels is missing or null"),
        ([{"input_ids": [1, 2], "completion_mask": [0, 1]}, {"input_ids": [1, 2], "completion_mask": None}], {},
         "row 1: completion_mask is missing or null, and the first row has it"),
        ([{"input_ids": [1, None]}], {}, "row 0: input_ids must be a list of whole numbers, not list"),
        ([{"input_ids": "abc"}], {}, "row 0: input_ids must be a list of whole numbers, not text"),
        ([{"input_ids": 3}], {}, "row 0: input_ids must be a list of whole numbers, not int"),
        ([{"input_ids": [[1, 2]]}], {}, "row 0: input_ids must be a list of whole numbers"),
        ([{"input_ids": [[1], [1, 2]]}], {}, "row 0: input_ids must be a list of whole numbers"),
        ([{"messages": [{"role": "user", "content": None, "calls": "\ud83d"}]}],
         {"chat_template": "{{ messages[0]['calls'] }}"}, "row 0: .*surrogates not allowed"),
        ([{"input_ids": [1.5, 2.0]}], {}, "row 0: input_ids must be a list of whole numbers"),
        ([{"input_ids": [1, -5]}], {}, "row 0: input_ids holds -5; tokens are numbered from 0"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 2**31]}], {}, "row 1: input_ids holds 2147483648; prepared numbers"),
        ([{"input_ids": [1, 2], "labels": [-100, 2**62]}], {}, "row 0: labels holds 4611686018427387904; prepared"),
        ([{"input_ids": [1, 2], "labels": [-100, -5]}], {}, "row 0: labels holds -5; tokens are numbered from 0, and"),
        ([{"text": ""}, {"text": ""}], {}, "none of the 2 rows has a token to train on after its first one"),
        ([{"text": "a"}, {"text": "abcdefghi"}], {"max_length": 4, "truncation_mode": "error", "packing": "bfd"},
         "row 1: has 10 tokens, more than max_length=4"),
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


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_contents_in_parts_are_one_text(template: str) -> None:
    """A template that prints a content would print Python's notation of a list."""
    tokenizer = byte_tokenizer(TEMPLATES[template])
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}]
    for options in (TextOptions(), TextOptions(assistant_only_loss=True)):
        expected, found = (
            prepare_text([said(text)], tokenizer, options).dataset[0] for text in ("Good day", parts)
        )
        assert found == expected


def test_a_template_that_renders_parts_gets_them() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part['text'] }};{% endfor %}"
        "{% endfor %}"
    )
    tokenizer = byte_tokenizer(template)
    found = prepare_text([said("Good day")], tokenizer).dataset[0]["input_ids"]
    assert tokenizer.decode(found) == "user:Good day;assistant:Yes;"


def test_what_a_tool_returned_need_not_be_text() -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content | tojson }}{% endfor %}"
    tokenizer = byte_tokenizer(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    rows = [{"messages": [CHAT[0], call | {"content": "f"}, {"role": "tool", "content": [{"sum": 3}]}]}]
    found = prepare_text(rows, tokenizer).dataset[0]["input_ids"]
    assert tokenizer.decode(found).endswith('tool [{"sum": 3}]')


def test_a_stream_of_tokens_keeps_them() -> None:
    """datasets before 3.3 removes a column that a step was to replace."""
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1, 2, n], "labels": [IGNORED, 2, n]} for n in (3, 4)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    assert list(prepare_text(stream, byte_tokenizer()).dataset) == rows


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_that_a_table_adds_to_records_are_not_in_the_text(streaming: bool) -> None:
    """Arrow gives every record the keys of all others, so a tool would have the parameters of another one."""
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [
        {"messages": CHAT, "tools": [{"function": {"name": n, "properties": {n: "x"}}, "type": "function"}]}
        for n in ("f", "g")  # with sorted keys: older datasets sorts those of records
    ]
    table = datasets.Dataset.from_list(rows)
    assert table[0]["tools"][0]["function"]["properties"] == {"f": "x", "g": None}
    given = table.to_iterable_dataset() if streaming else table
    expected = [row["input_ids"] for row in prepare_text(rows, tokenizer).dataset]
    assert [row["input_ids"] for row in prepare_text(given, tokenizer).dataset] == expected


@pytest.mark.parametrize("adds", ["<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_a_text_has_one_token_at_its_beginning_and_end(adds: str) -> None:
    """Some tokenizers add the tokens that a rendered text, or the preparation, has already."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = byte_tokenizer()
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=adds, special_tokens=[("<bos>", begin), ("<eos>", end)]
    )
    before = [begin] if "<bos>" in adds else []
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    for text in ("ab", "ab<eos>", "<bos>ab"):
        if text.startswith("<bos>") and not before:
            continue
        found = prepare_text([{"text": text}], tokenizer).dataset[0]["input_ids"]
        assert found == [*before, a, b, end], text
    pair = prepare_text([{"prompt": "a", "completion": "b"}], tokenizer).dataset[0]
    assert pair["input_ids"] == [*before, a, b, end]
    assert [label for label in pair["labels"] if label != -100] == [b, end]


def test_a_vocabulary_need_not_have_letters() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<eos>": 0, "one": 1, "two": 2})
    )  # nothing for others
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    row = prepare_text([{"prompt": "one", "completion": " two"}], words).dataset[0]
    assert row == {"input_ids": [1, 2, 0], "labels": [-100, 2, 0]}


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("seed", [None, 3])
def test_packed_rows_are_those_of_pack_dataset(strategy: str, seed: int | None, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer()
    rows = [{"text": "x" * (n * 7 % 23 + 1)} for n in range(1100)]
    packing = TextOptions(max_length=16, packing=strategy, shuffle_seed=seed)
    tokens = prepare_text(datasets.Dataset.from_list(rows), tokenizer, packing.of_tokens()).dataset
    expected = list(pack_dataset(tokens if seed is None else tokens.shuffle(seed=seed), 16, strategy))
    for given in (rows, datasets.Dataset.from_list(rows)):
        for _ in ("prepared", "found again"):
            found = prepare_text(given, tokenizer, packing, cache=tmp_path / "cache")
            assert list(found.dataset) == expected
            assert found.dataset.column_names == list(expected[0])
            assert found.summary is not None
            assert found.summary.packed_rows == len(expected)
            assert found.summary.rows == 1100
            assert found.summary.truncated == (
                sum(len(r["text"]) > 15 for r in rows) if strategy == "bfd" else 0
            )


def test_another_packing_uses_the_tokens_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, tokenizer = [{"text": "abc"}, {"text": "defg"}], byte_tokenizer()
    prepare_text(rows, tokenizer, TextOptions(max_length=16), cache=tmp_path)
    monkeypatch.setattr("windlass.text.prepare_text._encoded", lambda *_: pytest.fail("tokenized again"))
    found = prepare_text(rows, tokenizer, TextOptions(max_length=16, packing="bfd"), cache=tmp_path)
    assert found.dataset[0]["seq_lengths"] == [5, 4]
    assert len(list(tmp_path.iterdir())) == 2
    for count, seed in enumerate((1, 2), start=3):
        shuffled = TextOptions(max_length=16, packing="bfd", shuffle_seed=seed)
        prepare_text(rows, tokenizer, shuffled, cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == count
