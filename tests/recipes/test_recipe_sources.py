"""The arguments of a recipe know where each was set: in a line of the file, or by a command, a flag or a search."""

from __future__ import annotations

import re
from pathlib import Path

from tests.recipes.test_recipe import GOOD, write

from windlass.config.arguments import TrainingArguments, settings_beside, source_of
from windlass.recipes.recipe import note_recipe, open_recipe, training_arguments


def noted(path: Path, *overrides: str, tiny: bool = False, chosen: tuple[str, ...] = ()) -> TrainingArguments:
    recipe, draft = open_recipe(path, overrides, tiny=tiny)
    args = training_arguments(recipe.training, recipe.task)
    draft.chosen_by("the search", chosen)
    note_recipe(args, recipe, draft)
    return args


def test_where_the_values_of_a_recipe_were_set(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    good = GOOD.format(text=tmp_path / "text.txt").replace("learning_rate: 1e-3", "learning_rate: 2e-3")
    path = write(tmp_path, f"{good}parallel:\n  precision: bf16\n")
    args = noted(path, "training.seed=3", "data.max_samples=40")
    assert {name: source_of(args, name) for name in ("learning_rate", "seed", "bf16", "output_dir")} == {
        "learning_rate": f"{path}:11",
        "seed": "the command line",
        "bf16": f"{path}:14",
        "output_dir": "windlass train",
    }
    assert settings_beside(args) == {
        "data.train": (str(tmp_path / "text.txt"), f"{path}:3"),
        "data.block_size": (16, f"{path}:4"),
        "data.max_samples": (40, "the command line"),
        "model.config": ({"model_type": "llama", "hidden_size": 16}, f"{path}:6"),
        "tokenizer.train.vocab_size": (300, f"{path}:8"),
    }
    searched = noted(
        path, "training.seed=3", "data.max_samples=40", chosen=("training.seed", "data.max_samples")
    )
    assert source_of(searched, "seed") == "the search"
    assert settings_beside(searched)["data.max_samples"] == (40, "the search")
    of_layout = noted(path, "parallel.precision=bf16", "model.dtype=bfloat16", chosen=("parallel.precision",))
    assert source_of(of_layout, "bf16") == "the search"
    assert settings_beside(of_layout)["model.dtype"] == ("bfloat16", "the command line")
    assert source_of(noted(path, tiny=True), "max_steps") == "--tiny"


def test_a_built_in_recipe_is_named_without_its_folder() -> None:
    recipe, draft = open_recipe(None)
    args = training_arguments(recipe.training, recipe.task)
    note_recipe(args, recipe, draft)
    assert re.fullmatch(r"python-docs\.yaml:\d+", source_of(args, "learning_rate"))
