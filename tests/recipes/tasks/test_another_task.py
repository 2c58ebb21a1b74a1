"""A kind of task that is not built in, added by one object: preferences, of which a recipe then trains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.preference_trainer import PreferenceTrainer, accuracy

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from windlass import TrainingArguments
from windlass.cli.main import main
from windlass.cli.print_config import render_config
from windlass.config.sections.setting import setting
from windlass.core.errors import ConfigError
from windlass.recipes.readers import Record, texts
from windlass.recipes.recipe import load_recipe
from windlass.recipes.schema import DataSpec, Recipe, RecipeParts
from windlass.recipes.tasks import TASKS
from windlass.recipes.text_task import TextTask
from windlass.recipes.tokenizing import WRITER

RECIPE = """\
task: preference
data: {train: pairs.jsonl, max_length: 12, eval_fraction: 0.25}
tokenizer: {train: {vocab_size: 280}}
model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 2}}
sample: {prompt: the cat, max_new_tokens: 2}
training: {beta: 0.75, max_steps: 6, learning_rate: 0.05, save_strategy: steps, save_steps: 3, use_cpu: true,
  disable_tqdm: true, report_to: none}
"""


@dataclass(repr=False)
class PreferenceArguments(TrainingArguments):
    beta: float = setting(0.5, "how strongly the model is held to the reference")


class Preference(TextTask):
    """Two answers, one of which is better. Each is cut or padded to `data.max_length` tokens."""

    name = "preference"
    own_keys = ("data.max_length", "sample")
    arguments = PreferenceArguments
    model_class = "AutoModelForCausalLM"
    tokenizer_kind = WRITER

    def training_defaults(self, recipe: Recipe) -> dict[str, Any]:
        return {"remove_unused_columns": False}  # the trainer's loss reads them, not the model

    def text_columns(self, data: DataSpec) -> tuple[str, ...]:
        return ("chosen", "rejected")

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        options = {"max_length": data.max_length, "truncation": True, "padding": "max_length"}
        chosen, rejected = (
            torch.tensor(tokenizer(texts(records, name), **options)["input_ids"])
            for name in self.text_columns(data)
        )
        return [{"chosen": one, "rejected": other} for one, other in zip(chosen, rejected, strict=True)]

    def trainer_class(self) -> Any:
        return PreferenceTrainer

    def trainer_options(self, parts: RecipeParts, args: TrainingArguments) -> dict[str, Any]:
        assert isinstance(args, PreferenceArguments)
        return {"beta": args.beta, "compute_metrics": accuracy}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(TASKS, Preference.name, Preference())
    monkeypatch.chdir(tmp_path)
    rows = [{"chosen": f"the cat {i} sat down", "rejected": f"down {i} sat cat the"} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_it_trains_evaluates_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "recipe.yaml", "--output-dir", "run"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "18 texts, 6 texts held out for evaluation" in shown
    assert "eval accuracy  1.0000" in shown
    assert "Before training, the model writes: " in shown
    whole = (folder / "run" / "checkpoint-6" / "model.safetensors").read_bytes()
    assert main([*command, "--resume", "run/checkpoint-3"]) == 0
    assert (folder / "run" / "checkpoint-6" / "model.safetensors").read_bytes() == whole
    assert main(["train", "recipe.yaml", "--dry-run"]) == 0


def test_its_samples_are_shown_by_their_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "recipe.yaml", "--rows", "1", "--split", "eval"]) == 0
    first, sample, chosen, rejected = capsys.readouterr().out.splitlines()
    assert (first, sample) == ("6 samples for task preference", "--- sample 0")
    assert re.fullmatch(r"chosen  the cat \d+ sat down.*", chosen)
    assert re.fullmatch(r"rejected\s*down \d+ sat cat the.*", rejected)


def test_its_keys_are_checked_and_printed(folder: Path) -> None:
    recipe = load_recipe("recipe.yaml")
    line = "max_length: 12  # * longer texts are cut to so many tokens (default: 128)"
    assert f"  {line}" in render_config(recipe).splitlines()
    assert "mlm_probability" not in render_config(recipe, everything=True)
    assert "beta: 0.75" in render_config(recipe)
    with pytest.raises(ConfigError) as caught:
        load_recipe("recipe.yaml", ["data.mlm_probability=0.3", "metric=bleu", "training.packing=true"])
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["data.mlm_probability", "metric", "training.packing"]
    with pytest.raises(ConfigError, match=r"training.beta=0.75: has no meaning for task causal-lm"):
        load_recipe("recipe.yaml", ["task=causal-lm", "data.max_length=128", "data.eval_fraction=0"])
