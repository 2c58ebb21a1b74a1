from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from windlass.cli.main import main
from windlass.cli.print_config import render_config
from windlass.cli.recipe_schema import EDITOR_LINE, FILE, recipe_schema
from windlass.recipes.built_in_recipes import built_in, names
from windlass.recipes.recipe import load_recipe


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def wrong(validator: Draft202012Validator, text: str) -> list[str]:
    """Return the keys of a recipe that the schema objects to."""
    values: Any = yaml.safe_load(text)
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(values)]


@pytest.mark.parametrize("name", names())
def test_built_in_recipes_are_valid(name: str, validator: Draft202012Validator) -> None:
    assert not wrong(validator, built_in(name).read_text("utf-8"))


@pytest.mark.parametrize("everything", [False, True])
def test_printed_recipes_are_valid_and_name_the_schema(
    everything: bool, validator: Draft202012Validator
) -> None:
    printed = render_config(load_recipe("python-docs"), everything=everything)
    assert not wrong(validator, printed)
    assert printed.startswith(EDITOR_LINE)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("task: translation", "task"),
        ("data: {train: a.txt, blok_size: 3}", "data"),
        ("data: {train: a.txt, block_size: many}", "data"),
        ("metric: accuracy", "metric"),
        ("training: {learning_rte: 1}", "training"),
        ("training: {bf16: 3}", "training.bf16"),
        ("training: {save_steps: x}", "training.save_steps"),
        ("early_stopping: {patience: often}", "early_stopping.patience"),
    ],
)
def test_what_is_wrong_is_found(text: str, key: str, validator: Draft202012Validator) -> None:
    assert wrong(validator, text) == [key]


@pytest.mark.parametrize(
    "text",
    [
        "data: a.txt",
        "model: {name: gpt2}",
        "early_stopping: null",
        "training: {learning_rate: 2e-4, optim: adamw_torch, evaluation_strategy: steps, fsdp: full_shard auto_wrap}",
        "adapter: {r: 8}",
    ],
)
def test_every_form_of_a_value_is_valid(text: str, validator: Draft202012Validator) -> None:
    assert not wrong(validator, text)


def test_the_file_in_the_package_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """`windlass schema > src/windlass/recipes/recipe.schema.json` writes it."""
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == recipe_schema()
    assert FILE.read_text("utf-8") == printed


def test_a_copied_recipe_names_the_schema(tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    assert main(["init", "sst2", str(target)]) == 0
    assert target.read_text("utf-8").startswith(EDITOR_LINE)
    assert Path(EDITOR_LINE.split("file://")[1].strip()) == FILE
