"""Options that a recipe hands to peft and transformers are checked before any data is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.recipes.recipe import load_recipe
from windlass.recipes.tasks import TASKS

pytest.importorskip("peft")

RECIPE = """\
task: sft
data: {train: DATA, prompt_column: prompt, completion_column: completion}
base: {config: {hidden_size: 16}}
adapter: {r: 4, rank_pattern: {q_proj: 2}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DATA", str(tmp_path / "data.jsonl")))
    return path


def only_problem(path: Path, *overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("adapter.lora_r=8", "adapter.lora_r", "did you mean 'r'?"),
        ("adapter.lora_rank=8", "adapter.lora_rank", "did you mean 'r'?"),
        ("adapter.lora_target_modules=all", "adapter.lora_target_modules", "did you mean 'target_modules'?"),
        ("adapter.lora_alfa=8", "adapter.lora_alfa", "did you mean 'lora_alpha'?"),
        ("adapter.r=eight", "adapter.r", "must be a whole number"),
        ("adapter.r=0", "adapter.r", "1 or more"),
        ("adapter.rank_pattern.q_proj=two", "adapter.rank_pattern.q_proj", "1 or more"),
        ("adapter.lora_dropout=2", "adapter.lora_dropout", "between 0 and 1"),
        ("adapter.init_lora_weights=pisa", "adapter.init_lora_weights", "one of gaussian"),
        ("adapter.target_modules=3", "adapter.target_modules", "a list"),
        ("adapter.bias=some", "adapter.bias", "none, all, lora_only"),
        ("adapter.task_type=FOO", "adapter.task_type", "CAUSAL_LM"),
        ("adapter.loftq_config={bits: 4}", "adapter.loftq_config.bits", "LoftQConfig has no such option"),
        ("adapter.peft_type=IA3", "adapter.peft_type", "leave it out"),
        ("adapter={layers_pattern: h}", "adapter", "layers_to_transform"),
        ("base.config.hidden_sise=4", "base.config.hidden_sise", "did you mean 'hidden_size'?"),
        ("base.config.hidden_size=eight", "base.config", "hidden_size"),
        ("base.config.model_type=lama", "base.config.model_type", "did you mean 'llama'?"),
    ],
)
def test_a_wrong_option_is_found_before_any_work(recipe: Path, override: str, field: str, fix: str) -> None:
    problem = only_problem(recipe, override)
    assert problem.field.rpartition(": ")[2] == field
    assert fix in problem.fix


@pytest.mark.parametrize("key", ["hidden_sise", "num_attention_head"])
def test_so_is_one_of_a_new_model(tmp_path: Path, key: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "data: {format: python-docs}\ntokenizer: {train: {}}\n"
        f"model: {{config: {{model_type: llama, {key}: 4}}}}\n"
    )
    problem = only_problem(path)
    assert problem.field == f"{path}:3: model.config.{key}"


@pytest.mark.parametrize(
    "override",
    [
        "adapter.init_lora_weights=pissa_niter_4",
        "adapter.layer_replication=[[0, 2]]",
        "adapter.trainable_token_indices={embed_tokens: [1, 2]}",
        "adapter.target_modules=[q_proj]",
        "adapter.init_lora_weights=false",
    ],
)
def test_what_peft_takes_is_accepted(recipe: Path, override: str) -> None:
    assert load_recipe(recipe, [override]).adapter


BERT = """\
data: {format: python-docs}
tokenizer: {train: {}}
model: {config: {model_type: bert}}
"""


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ((), "is an encoder, whose tokens see those after them"),
        (("model.config.model_type=xlm-roberta",), "is an encoder"),
        (("model.config.model_type=distilbert",), "no model of this type that writes text"),
        (("model.config.model_type=t5",), "no model of this type that writes text"),
    ],
)
def test_a_model_that_cannot_write_is_refused_where_it_shall(
    tmp_path: Path, overrides: tuple[str, ...], fix: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BERT)
    problem = only_problem(path, *overrides)
    assert (problem.field.rpartition(": ")[2], fix in problem.fix) == ("model.config.model_type", True)
    load_recipe(path, ("task=masked-lm",))
    load_recipe(path, ("model.config.is_decoder=true",))
    load_recipe(path, ("model.config.model_type=gpt_neox",))


def test_so_is_a_base_that_cannot_write(recipe: Path) -> None:
    problem = only_problem(recipe, "base.config.model_type=bert")
    assert problem.field.endswith("base.config.model_type")
    assert "is an encoder" in problem.fix


def test_a_saved_model_that_cannot_write_is_refused_before_the_data_is_read(tmp_path: Path) -> None:
    transformers.BertConfig().save_pretrained(tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(f"data: {{train: {tmp_path}/text.txt}}\nmodel: {{name: {tmp_path}/model}}\n")
    (tmp_path / "text.txt").touch()
    recipe = load_recipe(path)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(ConfigError, match=r"model\.name='.*model': is an encoder"):
        TASKS[recipe.task].build_parts(recipe, TrainingArguments(tmp_path))
