from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.finetuning import small

from windlass.cli.main import main
from windlass.core.errors import DataError
from windlass.recipes.recipe import load_recipe
from windlass.recipes.schema import DataSpec, Recipe
from windlass.recipes.tuning_data import load_tuning_data, takes_turns, tuning_rows, tuning_texts
from windlass.text.forms import LocatedRows
from windlass.text.mixture import DatasetMixture
from windlass.text.token_store import default_cache

pytest.importorskip("transformers")
pytest.importorskip("datasets")


def test_rows_of_a_recipe() -> None:
    records = [("file:1", {"q": "one", "a": "two"})]
    rows = tuning_rows(records, DataSpec(prompt_column="q", completion_column="a"))
    assert rows == [{"prompt": "one\n", "completion": "two"}]
    assert tuning_rows(records, DataSpec()) == [{"q": "one", "a": "two"}]
    assert list(tuning_texts([*rows, {"text": "three"}], "text")) == ["one\ntwo", "three"]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert list(tuning_texts([{"messages": turns}], "text")) == ["one\ntwo\n"]
    assert list(tuning_texts([{"prompt": turns[:1], "completion": turns[1:]}], "text")) == ["one\ntwo\n"]
    with pytest.raises(DataError, match="columns input_ids need a model with its tokenizer"):
        list(tuning_texts([{"input_ids": [1]}], "text"))
    with pytest.raises(DataError, match="empty conversation"):
        list(tuning_texts([{"messages": []}], "text"))


@pytest.mark.parametrize("held", [2, 3])
def test_a_stream_that_is_held_out_as_a_whole_is_refused(held: int, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "recipe.yaml").write_text(
        f"task: sft\ndata: {{train: {tmp_path}/rows.jsonl, streaming: true, eval_rows: {held}}}\n"
        "training: {max_steps: 2}\n"
    )
    with pytest.raises(
        DataError, match=rf"rows.jsonl: the stream has no rows beside the {held} of data.eval"
    ):
        load_tuning_data(load_recipe(tmp_path / "recipe.yaml"), seed=1)


def test_an_empty_list_of_formats_is_no_format() -> None:
    rows = tuning_rows([("a:1", {"q": "one", "a": "two"})], DataSpec(prompt_format=[], completion_column="a"))
    assert rows == [{"q": "one", "a": "two"}]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A mixture of prompts and of conversations, for a model of a folder."""
    for name, rows in {"prompts": small.prompts(20), "chats": small.chats(20)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = small.saved(tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"task: sft\nmodel: {model}\n"
        f"data: {{mixture: {{{tmp_path}/prompts.jsonl: 3, {tmp_path}/chats.jsonl: 1}}, eval_fraction: 0.2}}\n"
        "training: {max_steps: 2, use_cpu: true, bf16: false, gradient_checkpointing: false, max_length: 32, "
        f"save_strategy: 'no', output_dir: {tmp_path / 'run'}, eval_strategy: steps, eval_steps: 2}}\n"
    )
    return path


def test_files_are_mixed_by_weight(recipe: Path) -> None:
    whole = ["data.eval_fraction=0", "training.eval_strategy=no"]
    data = load_tuning_data(load_recipe(recipe, whole), seed=1)
    assert isinstance(data.train, DatasetMixture)
    assert list(data.train.counts.values()) == [20, 6]
    assert data.evaluation is None
    with pytest.raises(DataError, match=r"different columns \(completion, prompt; messages\)"):
        load_tuning_data(load_recipe(recipe), seed=1)


def test_what_was_prepared_before_is_not_prepared_by_training(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    recipe.write_text(recipe.read_text().replace(f", {tmp_path}/chats.jsonl: 1", ""))
    assert main(["data", "prepare", str(recipe)]) == 0
    assert "16 rows" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in default_cache().rglob("*")}
    assert len(list(default_cache().iterdir())) == 2
    assert main(["train", str(recipe)]) == 0
    assert {path: path.stat().st_mtime_ns for path in default_cache().rglob("*")} == before
    assert "trained tokens" in (tmp_path / "run" / "report.html").read_text()


def test_an_invalid_row_is_named_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of a row after some are held out is not that of its line."""
    rows = small.chats(20)
    rows[13]["messages"][1]["content"] = None  # type: ignore[call-overload]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"task: sft\nmodel: {small.saved(tmp_path / 'model')}\ndata: {{train: {file}, eval_fraction: 0.3}}\n"
        f"training: {{max_steps: 1, use_cpu: true, bf16: false, output_dir: {tmp_path / 'run'}}}\n"
    )
    for command in (["train", str(path)], ["data", "prepare", str(path)], ["data", "prepare", str(file),
                    f"tokenizer={tmp_path / 'model'}"]):  # fmt: skip
        assert main(command) == 2
        assert "chats.jsonl:14: messages[1] (assistant) has no content" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt"])
def test_rows_are_trained_on_to_their_end(name: str, tmp_path: Path) -> None:
    """A text of a file of its own is not an example: its last lines are held out."""
    texts = [f"question {number}\n\nanswer {number}" for number in range(20)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / name).write_text(lines if name == "rows.jsonl" else "\n".join(texts))
    data = DataSpec(train=str(tmp_path / name), eval_fraction=0.25)
    parts = load_tuning_data(Recipe(task="sft", data=data), seed=1)
    found = [row["text"] for row in (*parts.train, *parts.evaluation)]
    if name == "rows.jsonl":
        assert len(parts.evaluation) == 5
        assert sorted(found) == sorted(texts)
    else:
        assert "".join(found).strip() == "\n".join(texts)


def test_an_invalid_row_is_named_by_its_line_where_a_tokenizer_is_trained_on_it(tmp_path: Path) -> None:
    rows = small.chats(6)
    rows[4]["messages"][0]["role"] = "bot"  # type: ignore[index]
    located = LocatedRows(rows, (f"chats.jsonl:{line}" for line in range(1, 7)))
    fault = r"chats\.jsonl:5: messages\[0\] has the unknown role 'bot'"
    others = LocatedRows(small.chats(3), ["others.jsonl"] * 3)
    for found in (located, DatasetMixture({"others": others, "chats": located}, seed=3)):
        with pytest.raises(DataError, match=fault):
            list(tuning_texts(found, "text"))
    with pytest.raises(DataError, match=fault):
        takes_turns(LocatedRows(located[4:], located.places[4:]), "text")
