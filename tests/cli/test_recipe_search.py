from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.cli.main import main

SPACE = """\
trials: 2
backend: grid
space:
  training.learning_rate: [1e-3, 1e-2]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a small text\n" for n in range(400)))
    return tmp_path


def test_a_recipe_is_searched_and_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "shakespeare", "data.train=text.txt", "--tiny", "--search", "space.yaml"]
    words.append("training.run_name=s3://me:hunter2@host/name")
    assert main([*words, "--output-dir", "runs/search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("best  ")
    best = lines[-1].split("=")[1]
    written = (folder / "runs" / "search" / "search.json").read_text()
    assert "@host/name" in written
    assert "hunter2" not in written
    trials = json.loads(written)["trials"]
    assert [trial["params"]["training.learning_rate"] for trial in trials] == [1e-3, 1e-2]
    assert float(best) == min(trials, key=lambda trial: trial["values"])["params"]["training.learning_rate"]
    assert (folder / "runs" / "search" / "run-1" / "checkpoint-4").is_dir()
    # A second call trains nothing again.
    assert main([*words, "--output-dir", "runs/search"]) == 0
    told = capsys.readouterr()
    assert "trial 0 (" not in told.out
    assert "differ in more than the space" not in told.err
    assert main([*words, "training.weight_decay=0.5", "--output-dir", "runs/search"]) == 0
    assert "training.weight_decay: 0.5 != 0.1 (of the trials so far)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "trails: 2\nspace: {training.seed: [1]}",
            "space.yaml:1: trails=2: is not a key of a search; did you mean",
        ),
        (
            "space: {training.sed: [1]}",
            "space.training.sed=[1]: is not a key of a recipe; did you mean",
        ),
        ("space: {training.output_dir: [a, b]}", "is a folder of each trial"),
        ("trials: 3", "space=None: must be a mapping"),
        ("metric: 3\nspace: {training.seed: [1]}", "space.yaml:1: metric=3: must be text or a list"),
        ("trials: many\nspace: {training.seed: [1]}", "trials='many': must be a whole number"),
        ("space: {training.seed: 3}", "hp_space.training.seed=3: must be a list of values"),
        ("backend: tpe\nspace: {training.seed: [1]}", "backend='tpe': must be one of optuna, random, grid"),
        (
            "backend: optuna\npruner: hyper\nspace: {training.seed: [1]}",
            "pruner='hyper': must be 'median' or None",
        ),
    ],
)
def test_mistakes_are_named_before_a_trial(
    text: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "space.yaml").write_text(text)
    assert main(["train", "shakespeare", "data.train=text.txt", "--tiny", "--search", "space.yaml"]) == 2
    assert words in capsys.readouterr().err


def test_what_contradicts_a_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "shakespeare", "data.train=text.txt", "--dry-run", "--search", "space.yaml"]) == 2
    assert "--dry-run=True: has no meaning with --search" in capsys.readouterr().err
    none = ["data.eval_fraction=0", "training.eval_strategy=no"]
    assert main(["train", "shakespeare", "data.train=text.txt", *none, "--search", "space.yaml"]) == 2
    assert "data.eval_fraction=0.0: holds out nothing" in capsys.readouterr().err
