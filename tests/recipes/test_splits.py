"""What is held out is never trained on, and is the same in every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError, DataError
from windlass.recipes import splits
from windlass.recipes.readers import Record
from windlass.recipes.recipe import load_recipe, training_arguments
from windlass.recipes.schema import DataSpec, Recipe
from windlass.recipes.tasks import TASKS


def records(values: list[str], name: str = "text") -> list[Record]:
    return [(f"row {index}", {name: value}) for index, value in enumerate(values)]


@given(count=st.integers(2, 60), seed=st.integers(0, 99), fraction=st.floats(0.05, 0.9))
def test_records_are_shared_out_without_overlap(count: int, seed: int, fraction: float) -> None:
    if round(count * fraction) in (0, count):
        return
    rows = records([f"text {index}" for index in range(count)])
    train, held = splits.hold_out(rows, "rows", fraction, seed)
    assert sorted(train + held, key=lambda row: int(row[0].split()[1])) == rows
    assert len(held) == round(count * fraction)
    assert (train, held) == splits.hold_out(rows, "rows", fraction, seed)


@given(texts=st.lists(st.lists(st.text("ab ", min_size=1), min_size=1, max_size=9), min_size=1, max_size=5))
def test_tails_are_cut_at_line_ends_and_nothing_is_lost(texts: list[list[str]]) -> None:
    whole = ["".join(f"{line}\n" for line in lines) for lines in texts]
    try:
        train, held = splits._hold_out_tails(records(whole), "text", 0.3)
    except DataError:
        return
    tails = {where: values["text"] for where, values in held}
    heads = {where: values["text"] for where, values in train}
    for where, values in records(whole):
        head, tail = heads[where], tails.get(where, "")
        assert values["text"].startswith(head)
        assert head.endswith("\n")
        assert head + tail == values["text"] or not values["text"][len(head) :].strip()


def test_too_little_to_share_is_said() -> None:
    with pytest.raises(DataError, match="eval_fraction"):
        splits.hold_out(records(["one"]), "x.jsonl: 1 records", 0.05, 1)


def test_texts_of_one_line_are_held_out_whole(tmp_path: Path) -> None:
    rows = [{"text": f"line {number}"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(train=str(tmp_path / "rows.jsonl"), eval_fraction=0.25)
    train, held = splits.load_records(data, seed=1, cut_texts=True)
    assert len(held) == 5
    assert sorted(values["text"] for _, values in train + held) == sorted(row["text"] for row in rows)


def test_labels_are_ordered_by_value() -> None:
    assert splits.label_names(records(["10", "9", "9"], "label"), "label") == ["9", "10"]
    assert splits.label_names(records(["pos", "neg"], "label"), "label") == ["neg", "pos"]
    assert splits.label_ids(records(["pos", "neg"], "label"), "label", ["neg", "pos"]) == [1, 0]
    assert splits.label_names(records(["--1", "²", "1"], "label"), "label") == ["--1", "1", "²"]


def test_labels_of_one_value_have_one_order_in_all_processes() -> None:
    code = (
        "from windlass.recipes.splits import label_names\n"
        "print(label_names([('row', {'label': word}) for word in ('1', '01', '001', '0001', '2')], 'label'))"
    )
    for seed in ("1", "2"):  # of the hashes by which a set is ordered
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout == "['0001', '001', '01', '1', '2']\n"


def test_one_class_and_unknown_class_are_refused() -> None:
    with pytest.raises(DataError, match="one class only"):
        splits.label_names(records(["1", "1"], "label"), "label")
    for nothing in ("", float("nan")):
        with pytest.raises(DataError, match="row 1: column 'label' is empty"):
            splits.label_names([*records(["1"], "label"), ("row 1", {"label": nothing})], "label")
    with pytest.raises(DataError, match=r"row 1: column 'label' must hold one class, .* holds a list"):
        splits.label_names([*records(["1"], "label"), ("row 1", {"label": [0, 2]})], "label")
    with pytest.raises(DataError, match="row 0: class '7' never occurs"):
        splits.label_ids(records(["7"], "label"), "label", ["0", "1"])


def test_no_evaluation_when_the_fraction_is_zero() -> None:
    data = DataSpec(format="python-docs", eval_fraction=0.0)
    train, held = splits.load_records(data, seed=1, cut_texts=True)
    assert train
    assert held == []


def test_each_split_of_a_dataset_of_the_hub_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the training data, which an evaluation would otherwise be measured on."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = tmp_path / "rows"
    rows.mkdir()
    for name in ("train", "validation", "test"):
        (rows / f"{name}.jsonl").write_text(f'{{"text": "from {name}", "target": "to"}}\n' * 3)
    hub = {"format": "hub", "eval_split": "validation", "test_split": "test"}
    new = {"model": {"config": {"model_type": "t5"}}, "tokenizer": {"train": {"vocab_size": 300}}}

    def load(**data: str) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(json.dumps({"task": "seq2seq", "data": data, **new}))
        return load_recipe(str(tmp_path / "recipe.yaml"))

    for named in ({}, {"eval": str(rows), "test": str(rows)}):
        recipe = load(**hub, train=str(rows), **named)
        parts = TASKS["seq2seq"].build_parts(recipe, training_arguments(recipe.training, recipe.task))
        for found, name in ((parts.train, "train"), (parts.evaluation, "validation"), (parts.test, "test")):
            assert parts.tokenizer.decode(found[0]["input_ids"], skip_special_tokens=True) == f"from {name}"
    said = r"data.eval='x'.*set data.eval_split(.|\n)*data.test='y'.*set data.test_split"
    with pytest.raises(ConfigError, match=said):
        load(format="hub", train="x", eval="x", test="y")
