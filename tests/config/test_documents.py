"""Settings as text: what is written reads back, and an error names file, line and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.config import documents
from windlass.config.arguments import TrainingArguments
from windlass.config.values import coerce
from windlass.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5), ("1E3", 1e3), (".5", 0.5), ("-2.", -2.0), ("3", 3), ("+3", 3), ("0x1f", 31), ("true", True),
        ("False", False), ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("null", None), ("~", None),
        ("", None), ("1.5.2", "1.5.2"), ("v1", "v1"), ("e5", "e5"), ("-010", -10),
        ("1:00:00", "1:00:00"), ("1_0", "1_0"), ("2026-11-30", "2026-11-30"),
        ("[1, 2e-3]", [1, 2e-3]), (".inf", float("inf")),
        ("{a: no}", {"a": "no"}), ("'5'", "5"),
    ],
)  # fmt: skip
def test_scalars_are_what_they_look_like(text: str, value: Any) -> None:
    assert documents.loads(f"key: {text}\n").values == {"key": value}
    assert documents.parse_override(f"key={text}") == (("key",), value)


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
_WORDS = st.from_regex(r"[-+.0-9eExXa-f_:~]{1,6}|[nNyY](o|es)|[oO](n|ff)|[tT]rue|[nN]ull", fullmatch=True)


@given(st.dictionaries(st.one_of(st.text(), _WORDS), st.one_of(_VALUES, _WORDS)))
def test_what_is_written_reads_back(values: dict[str, Any]) -> None:
    line = documents.one_line(values)
    assert "\n" not in line
    assert documents.loads(line).values == values
    assert documents.loads(f"key: {line}").values == {"key": values}
    assert documents.loads(json.dumps(values), json_text=True).values == values


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe.json"])
def test_files_by_their_ending(name: str, tmp_path: Path) -> None:
    values = {"train": {"learning_rate": 5e-5, "eval_strategy": "no"}, "list": [1, None]}
    write = json.dumps if name.endswith("json") else documents.one_line
    (tmp_path / name).write_text(write(values))
    assert documents.load(tmp_path / name).values == values


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "x: 1\ny: [1, 2\nz: 3\n", ["a.yaml:3"]),
        ("a.yaml", "x: 1\ny:\n  z: 1\n  z: 2\n", ["a.yaml:4", "y.z", "line 3"]),
        ("a.yaml", "- 1\n- 2\n", ["a.yaml", "mapping"]),
        ("a.yaml", "x: !!python/object/apply:os.system [ls]\n", ["a.yaml:1"]),
        ("a.json", '{\n"x": 1,\n"y" 2}', ["a.json:3"]),
        ("a.json", '{"x": 1, "x": 2}', ["x", "twice"]),
        ("a.json", '{"x": {"y": 1,\n"y": 2}}', ["a.json:2", "x.y", "line 1"]),
        ("a.json", '{"x":\t1, "x": 2}', ["x", "twice"]),
    ],
)
def test_a_broken_file_is_named_with_its_line(name: str, text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        documents.load(tmp_path / name)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_lines_of_json_are_those_of_their_own_keys() -> None:
    text = '{\n"task": {\n"model": 1},\n"words": ["\\"model\\": 2"],\n"model": "\\u00e9"}'
    found = documents.loads(text, "a.json", json_text=True)
    assert found.values["model"] == "é"
    assert (found.place("model"), found.where("task", "model")) == ("a.json:5", "a.json:3: task.model")
    with_tab = documents.loads('{"x":\t1}', "a.json", json_text=True)
    assert (with_tab.values, with_tab.place("x")) == ({"x": 1}, "a.json")


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        documents.load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        documents.load(tmp_path / "binary.yaml")


def test_overrides_name_keys_and_values() -> None:
    assert documents.parse_override("--train.learning_rate=5e-5") == (("train", "learning_rate"), 5e-5)
    assert documents.parse_override("new=[1]") == (("new",), [1])
    assert documents.parse_override("mixture={http://a: [], 'b:c', d}") == (
        ("mixture",),
        {"http://a": [], "b:c": None, "d": None},
    )
    with pytest.raises(ConfigError, match="'r:8' has no value: write a space after the colon"):
        documents.parse_override("adapter={r:8, lora_alpha: 16}")


@pytest.mark.parametrize(
    "text",
    [
        *("nothing", "c=[1", "=3", "x..y=1"),
        *("control=a\x01b", "surrogate=\udcc3", "tag=!!int x", "deep=" + "[" * 5000),
    ],
)
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be name=value|not a valid value"):
        documents.parse_override(text)


def test_text_is_read_by_the_fields_type() -> None:
    said = documents.loads(
        "learning_rate: '5e-5'\nmax_steps: '10'\nbf16: yes\nrun_name: 'yes'\nevaluation_strategy: no\n"
    )
    args = TrainingArguments(**coerce(TrainingArguments, said.values))
    assert (args.learning_rate, args.max_steps, args.bf16, args.run_name) == (5e-5, 10, True, "yes")
    assert args.eval_strategy == "no"


def test_arguments_survive_a_file(tmp_path: Path) -> None:
    args = TrainingArguments("out", learning_rate=1e-5, eval_strategy="steps", eval_steps=0.1)
    for name, write in (("a.yaml", documents.one_line), ("a.json", json.dumps)):
        (tmp_path / name).write_text(write(args.to_dict()))
        assert TrainingArguments(**documents.load(tmp_path / name).values) == args
