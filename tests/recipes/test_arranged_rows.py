from __future__ import annotations

from pathlib import Path

import pytest

from windlass.core.errors import ConfigError, DataError
from windlass.recipes.arranged_rows import arranged, columns_of, columns_read
from windlass.recipes.recipe import load_recipe
from windlass.recipes.schema import DataSpec, MessagesSpec

FORMATS = ["{{Q}} {question} {hint}", "{{Q}} {question}"]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "a", "hint": "b"}, "{Q} a b"),
        ({"question": "a", "hint": ""}, "{Q} a"),
        ({"question": "a", "hint": None}, "{Q} a"),
        ({"question": "{hint}"}, "{Q} {hint}"),
    ],
)
def test_the_first_format_whose_columns_have_a_value_is_used(row: dict[str, str], prompt: str) -> None:
    assert arranged("file:1", row, DataSpec(prompt_format=FORMATS))["prompt"] == prompt


def test_a_row_that_fits_no_format_is_named() -> None:
    with pytest.raises(
        DataError, match=r"file:1: no text in the columns of .* \(question, hint or question\)"
    ):
        arranged("file:1", {"hint": "b"}, DataSpec(prompt_format=FORMATS))


def test_columns_are_renamed_and_messages_found() -> None:
    data = DataSpec(
        rename={"q": "instruction"}, messages=MessagesSpec("dialog", "who", "text", {"agent": "assistant"})
    )
    row = {"q": "one", "other": 1, "dialog": [{"who": "agent", "text": "two", "name": "x"}]}
    messages = [{"name": "x", "role": "assistant", "content": "two"}]
    assert arranged("file:1", row, data) == {"instruction": "one", "other": 1, "messages": messages}
    assert columns_read(data) == {"q", "dialog"}
    with pytest.raises(DataError, match="file:1: column 'dialog' must hold a list of messages"):
        arranged("file:1", {"q": "one", "dialog": "two"}, data)


@pytest.mark.parametrize("row", [{"q": "one", "text": "two"}, {"text": "two", "q": "one"}])
def test_a_renamed_column_takes_the_place_of_another(row: dict[str, str]) -> None:
    assert arranged("file:1", row, DataSpec(rename={"q": "text"})) == {"text": "one"}
    assert arranged("file:1", row, DataSpec(rename={"q": "text", "text": "q"})) == {"text": "one", "q": "two"}
    # Files of a mixture may have different names for one column.
    assert arranged("file:1", {"text": "two"}, DataSpec(rename={"q": "text"})) == {"text": "two"}
    with pytest.raises(DataError, match=r"file:1: data.rename calls 2 of its columns 'a'"):
        arranged("file:1", row, DataSpec(rename={"q": "a", "text": "a"}))


@pytest.mark.parametrize("text", ["{0}", "{}", "{a.b}", "{a!r}", "{a:>3}", "{a", "a}"])
def test_a_format_names_columns_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not name a column|expected '}'|Single '}'"):
        columns_of(text)


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("data.prompt_format='{question!r}'", "data.prompt_format", "does not name a column"),
        ("data.messages.roles={agent: helper}", "data.messages.roles.agent", "is not a role"),
        ("data.prompt_column=q", "data.prompt_column", "name only one of the two"),
        ("data.completion_column=null", "data.completion_column", "name both or neither"),
        ("data.messages.colum=a", "data.messages.colum", "did you mean data.messages.column?"),
    ],
)
def test_wrong_keys_are_found_before_data_is_read(
    tmp_path: Path, override: str, field: str, fix: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"task: sft\nmodel: m\ndata: {{train: {tmp_path}/rows.jsonl, prompt_format: '{{q}}', completion_column: a}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    (problem,) = caught.value.problems
    assert problem.field.rpartition(": ")[2] == field
    assert fix in problem.fix
