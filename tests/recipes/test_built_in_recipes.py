"""`windlass recipes` and `windlass init`, and a recipe that is named instead of a file."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from windlass.cli.main import main
from windlass.cli.recipe_schema import EDITOR_LINE
from windlass.core.errors import ConfigError
from windlass.recipes.built_in_recipes import FOLDER, names
from windlass.recipes.recipe import load_recipe


def test_each_is_listed_on_two_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[: 2 * len(names()) : 2]] == names()
    assert all(line.split()[0] == "needs" for line in shown[1 : 2 * len(names()) : 2])
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("name", names())
def test_the_head_says_how_to_run_it(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# Needs: ")
    command = "windlass train" if name == "python-docs" else f"windlass train {name}"
    assert any(line.startswith(f"#   {command}") for line in lines)
    assert max(map(len, lines)) <= 120
    head = " ".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    if "GPU" in head:
        assert "Memory, by `windlass estimate-memory" in head
        assert "Time, estimated (docs/recipes.md)" in head
    assert re.search(r"\b(minutes?|hours)\b", head), "how long it takes"


def test_a_copy_is_run_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sst2", "mine/first.yaml"]) == 0
    assert "windlass train mine/first.yaml" in capsys.readouterr().out
    copied, original = (tmp_path / "mine/first.yaml").read_text(), (FOLDER / "sst2.yaml").read_text()
    assert copied == EDITOR_LINE + original.replace("windlass train sst2", "windlass train mine/first.yaml")
    assert main(["init", "python-docs"]) == 0
    assert "#   windlass train python-docs.yaml\n" in Path("python-docs.yaml").read_text()
    assert load_recipe("python-docs.yaml") == load_recipe(None)


def test_what_cannot_be_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, expected in (
        (["shakespear"], "did you mean shakespeare?"),
        (["nothing-like-it"], "`windlass recipes` lists"),
        (["digits", "copy.txt"], "end with .yaml"),
    ):
        assert main(["init", *words]) == 2
        assert expected in capsys.readouterr().err
    assert main(["init", "digits"]) == main(["init", "digits"]) - 2 == 0
    assert "exists already" in capsys.readouterr().err


def test_a_file_comes_before_a_built_in_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("python-docs").training["max_steps"] == 400
    Path("python-docs").write_text((FOLDER / "python-docs.yaml").read_text().replace("400", "7"))
    assert load_recipe("python-docs").training["max_steps"] == 7
    with pytest.raises(ConfigError, match="there is no such recipe"):
        load_recipe("runs")


def test_a_file_of_data_replaces_data_that_is_not_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"text": "a"}\n')
    Path("hub.yaml").write_text(
        "task: sft\nmodel: gpt2\ndata: {train: some/dataset, format: hub, subset: large, split: test}\n"
    )
    own = load_recipe("hub.yaml", ["data.train=mine.jsonl"]).data
    assert (own.train, own.format, own.subset, own.split) == ("mine.jsonl", "auto", None, "train")
    other = load_recipe("hub.yaml", ["data.train=another/dataset"]).data
    assert (other.train, other.format, other.subset, other.split) == (
        "another/dataset",
        "hub",
        "large",
        "test",
    )


def test_a_name_replaces_what_the_file_has_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {format: python-docs}\nmodel: {config: {model_type: llama}, dtype: bfloat16}\n")
    for word in ("model=gpt2", "model.name=gpt2"):
        model = load_recipe(path, [word]).model
        assert (model.name, model.config, model.dtype) == ("gpt2", None, "bfloat16")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.streaming=true"], "max_steps=-1: a stream has no length"),
        (["data.streaming=true", "training.max_steps=3", "data.train=a.csv"], "csv is not read as a stream"),
        (
            [
                "data.streaming=true",
                "training.max_steps=3",
                "data.prompt_column=a",
                "data.completion_column=b",
            ],
            "call them",
        ),
        (["data.streaming=true", "training.max_steps=3", "training.eval_strategy=steps"], "data.eval_rows"),
        (["data.streaming=true", "training.max_steps=3", "data.rename={q: text}"], "are not renamed"),
        (["data.streaming=true", "training.max_steps=3", "data.messages.role=from"], "are not renamed"),
        (["data.streaming=true", "training.max_steps=3", "data.eval_fraction=0.3"], "set data.eval_rows"),
        (
            ["data.streaming=true", "training.max_steps=3", "data.eval_rows=1", "data.eval=a.jsonl"],
            "leave one of the two out",
        ),
        (["data.train=''", "data.mixture=[a.jsonl, a.jsonl]"], "names a.jsonl 2 times; name it once"),
        (["data.eval_rows=3"], "is for streams"),
        (["early_stopping.patience=2"], "follows evaluations"),
        (["early_stopping.patience=0", "training.eval_strategy=epoch"], "at least 1"),
    ],
)
def test_streams_and_early_stopping_are_checked(
    overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "a.csv"):
        Path(name).write_text('{"text": "a"}\n')
    Path("own.yaml").write_text("task: sft\nmodel: gpt2\ndata: {train: a.jsonl}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe("own.yaml", overrides)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1, caught.value


def test_early_stopping_keeps_the_best() -> None:
    recipe = load_recipe("python-docs", ["early_stopping={patience: 2}"])
    assert recipe.early_stopping is not None
    assert (recipe.early_stopping.patience, recipe.training["load_best_model_at_end"]) == (2, True)
