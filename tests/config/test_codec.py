"""Settings as text: what is written reads back, and an error names file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.config import codec
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5), ("1E3", 1e3), (".5", 0.5), ("-2.", -2.0), ("3", 3), ("+3", 3), ("0x1f", 31), ("true", True),
        ("False", False), ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("null", None), ("~", None),
        ("", None), ("1.5.2", "1.5.2"), ("v1", "v1"), ("e5", "e5"), ("[1, 2e-3]", [1, 2e-3]), (".inf", float("inf")),
        ("{a: no}", {"a": "no"}), ("'5'", "5"),
    ],
)  # fmt: skip
def test_scalars_are_what_they_look_like(text: str, value: Any) -> None:
    assert codec.loads(f"key: {text}\n").values == {"key": value}
    assert codec.parse_override(f"key={text}") == (("key",), value)


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
_WORDS = st.from_regex(r"[-+.0-9eExXa-f_:~]{1,6}|[nNyY](o|es)|[oO](n|ff)|[tT]rue|[nN]ull", fullmatch=True)


@given(st.dictionaries(st.one_of(st.text(), _WORDS), st.one_of(_VALUES, _WORDS)))
def test_what_is_written_reads_back(values: dict[str, Any]) -> None:
    assert codec.loads(codec.dumps(values)).values == values
    assert codec.loads(codec.dumps(values, json_text=True), json_text=True).values == values


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe.json"])
def test_files_by_their_ending(name: str, tmp_path: Path) -> None:
    values = {"train": {"learning_rate": 5e-5, "eval_strategy": "no"}, "list": [1, None]}
    codec.dump(values, tmp_path / name)
    assert codec.load(tmp_path / name).values == values


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "x: 1\ny: [1, 2\nz: 3\n", ["a.yaml:3"]),
        ("a.yaml", "x: 1\ny:\n  z: 1\n  z: 2\n", ["a.yaml:4", "y.z", "line 3"]),
        ("a.yaml", "- 1\n- 2\n", ["a.yaml", "mapping"]),
        ("a.yaml", "x: !!python/object/apply:os.system [ls]\n", ["a.yaml:1"]),
        ("a.json", '{\n"x": 1,\n"y" 2}', ["a.json:3"]),
        ("a.json", '{"x": 1, "x": 2}', ["x", "twice"]),
    ],
)
def test_a_broken_file_is_named_with_its_line(name: str, text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        codec.load(tmp_path / name)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        codec.load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        codec.load(tmp_path / "binary.yaml")


def test_overrides_reach_inside_and_leave_the_original() -> None:
    values = {"train": {"learning_rate": 1.0}, "empty": None}
    changed = codec.apply_overrides(
        values, ["train.learning_rate=5e-5", "train.bf16=true", "empty.a.b=x", "new=[1]"]
    )
    assert changed == {"train": {"learning_rate": 5e-5, "bf16": True}, "empty": {"a": {"b": "x"}}, "new": [1]}
    assert values == {"train": {"learning_rate": 1.0}, "empty": None}


def test_bad_overrides_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        codec.apply_overrides({"a": 1}, ["nothing", "a.b=2", "c=[1", "=3", "x..y=1", "ok=1"])
    assert len(error.value.problems) == 5


def test_building_names_file_line_and_the_nearest_key() -> None:
    document = codec.loads(
        "train:\n  output_dir: out\n  learning_rat: 1\n  seed: -1\n  fp16: yes\n  bf16: true\n", "recipe.yaml"
    )
    with pytest.raises(ConfigError) as error:
        codec.build(TrainingArguments, document, "train")
    lines = [str(p) for p in error.value.problems]
    assert any("recipe.yaml:3: train.learning_rat" in line and "'learning_rate'" in line for line in lines)
    assert any("recipe.yaml:4: seed" in line for line in lines)
    assert any("recipe.yaml:5: fp16" in line for line in lines)
    assert len(lines) == 3


def test_building_reads_text_by_the_fields_type() -> None:
    document = codec.loads(
        "learning_rate: '5e-5'\nmax_steps: '10'\nbf16: yes\nrun_name: 'yes'\nevaluation_strategy: no\n"
    )
    args = codec.build(TrainingArguments, document)
    assert (args.learning_rate, args.max_steps, args.bf16, args.run_name) == (5e-5, 10, True, "yes")
    assert args.eval_strategy == "no"


def test_arguments_survive_a_file(tmp_path: Path) -> None:
    args = TrainingArguments("out", learning_rate=1e-5, eval_strategy="steps", eval_steps=0.1)
    for name in ("a.yaml", "a.json"):
        codec.dump(args.to_dict(), tmp_path / name)
        assert codec.build(TrainingArguments, codec.load(tmp_path / name)) == args
