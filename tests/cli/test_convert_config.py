"""Configurations of other programs become recipes; what a recipe does not have is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.cli.convert_config import convert
from windlass.cli.main import main
from windlass.core.errors import ConfigError
from windlass.recipes.recipe import load_recipe

TRL = """\
model_name_or_path: MODEL
model_revision: v2
dtype: bfloat16
attn_implementation: sdpa
dataset_name: DATA
max_seq_length: 512
learning_rate: 2.0e-4
packing: true
gradient_checkpointing: true
use_peft: true
lora_r: 32
lora_target_modules: all-linear
load_in_4bit: true
deepspeed: zero2.json
output_dir: out
"""
AXOLOTL = """\
base_model: MODEL
load_in_4bit: true
load_in_8bit: no
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: DATA
    type: chat_template
  - path: other
    type: alpaca
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
saves_per_epoch: 1
flash_attention: true
wandb_project: mine
output_dir: out
"""
NO_WARMUP = {"warmup_steps": 0}  # whose default is not carried over as a whole
FACTORY = """\
stage: sft
do_train: true
model_name_or_path: MODEL
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: DATA
template: llama3
cutoff_len: 1024
max_samples: 50
preprocessing_num_workers: 4
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
train_on_prompt: no
save_strategy: no
output_dir: out
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "model").mkdir()
    (tmp_path / "data.jsonl").write_text('{"text": "one two"}\n')
    return tmp_path / "model", tmp_path / "data.jsonl"


def converted(text: str, places: tuple[Path, Path], capsys: Any) -> tuple[Any, str]:
    source, target = places[0].parent / "theirs.yaml", places[0].parent / "ours.yaml"
    source.write_text(text.replace("MODEL", str(places[0])).replace("DATA", str(places[1])))
    assert main(["convert-config", str(source), "--output", str(target)]) == 0
    return load_recipe(target), capsys.readouterr().out


def test_of_trl(places: tuple[Path, Path], capsys: Any) -> None:
    recipe, said = converted(TRL, places, capsys)
    assert (recipe.model.name, recipe.model.dtype, recipe.data.train) == (
        str(places[0]),
        "bfloat16",
        str(places[1]),
    )
    assert recipe.adapter == {
        "r": 32, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear", "task_type": "CAUSAL_LM"
    }  # fmt: skip
    assert recipe.quantization == "nf4"
    assert recipe.training["max_length"] == 512
    assert recipe.training["model_init_kwargs"] == {"revision": "v2", "attn_implementation": "sdpa"}
    assert "deepspeed=" in said
    assert "Not carried over: 1 keys" in said


def test_of_axolotl(places: tuple[Path, Path], capsys: Any) -> None:
    recipe, said = converted(AXOLOTL, places, capsys)
    assert recipe.adapter["target_modules"] == "all-linear"
    assert (recipe.quantization, recipe.data.eval_fraction) == ("nf4", 0.05)
    wanted = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1, "packing": True,
        "lr_scheduler_type": "cosine", "bf16": True, "assistant_only_loss": True, "save_strategy": "epoch",
    }  # fmt: skip
    assert wanted.items() <= recipe.training.items()
    lost = {line.split("=")[0].strip() for line in said.splitlines()[1:]}
    assert "datasets" in lost, "the second one has another form"
    assert (recipe.training["report_to"], recipe.training["project"]) == (["wandb"], "mine")
    assert "saves_per_epoch" not in lost, "it is the end of each epoch"
    assert ("optim" in lost) != ("optim" in recipe.training)


def test_of_llama_factory(places: tuple[Path, Path], capsys: Any) -> None:
    recipe, said = converted(FACTORY, places, capsys)
    assert recipe.adapter["r"] == 8
    assert recipe.data.max_samples == 50
    assert (recipe.training["max_length"], recipe.training["dataset_num_proc"]) == (1024, 4)
    assert recipe.training["warmup_steps"] == 0.1
    assert "completion_only_loss" not in recipe.training
    assert recipe.training["save_strategy"] == "no"
    assert "template=llama3: the chat template of the tokenizer is used" in said


def test_printed_it_is_a_recipe_with_the_list_on_top(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "model_name_or_path: hub/model\ndataset_name: hub/data\nunknown_thing: [1, 2]\nlora_r: 4\n"
    )
    assert main(["convert-config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "#   unknown_thing: [1, 2]  (a recipe has no such key)" in shown
    values = yaml.safe_load(shown)
    assert values == {
        "task": "sft", "model": {"name": "hub/model"},
        "data": {"format": "hub", "train": "hub/data", "eval_fraction": 0},
    }  # fmt: skip
    assert main(["convert-config", str(path), "--output", str(path)]) == 2
    assert "is the file that is converted; name another" in capsys.readouterr().err
    assert "unknown_thing" in path.read_text()
    assert main(["convert-config", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["recipe"], facts["written"]) == (values, None)
    assert facts["not_carried_over"]["unknown_thing"] == {
        "value": [1, 2],
        "reason": "a recipe has no such key",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1}, "is of none of the known programs"),
        ({"stage": "dpo", "model_name_or_path": "m"}, "another kind of training"),
        ({"base_model": "m", **NO_WARMUP, "rl": "dpo"}, "another kind of training"),
    ],
)
def test_what_cannot_be_converted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(values)


def test_a_file_that_is_not_text_is_named(tmp_path: Path, capsys: Any) -> None:
    theirs, listed = tmp_path / "theirs.yaml", tmp_path / "dataset_info.json"
    theirs.write_bytes(b"stage: sft\ndataset: \xe4\n")
    assert main(["convert-config", str(theirs)]) == 2
    assert "theirs.yaml': cannot be read: it is not UTF-8 text" in capsys.readouterr().err
    theirs.write_text("stage: sft\ndataset: a\ndataset_dir: .\n")
    listed.write_text("{")
    assert main(["convert-config", str(theirs)]) == 2
    assert "dataset_info.json" in capsys.readouterr().err


def test_weights_of_few_bits_need_an_adapter() -> None:
    made = convert({"base_model": "m", **NO_WARMUP, "load_in_8bit": True, "adapter": "ia3"})
    assert "quantization" not in made.recipe
    assert made.lost.keys() == {"adapter", "load_in_8bit"}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"model_name_or_path": "m", "use_peft": False, "warmup_ratio": 0.03}, {"warmup_steps": 0.03}),
        (
            {"base_model": "m", **NO_WARMUP, "eval_steps": 50, "val_set_size": 0.1},
            {"eval_strategy": "steps", "eval_steps": 50},
        ),
        ({"base_model": "m", **NO_WARMUP, "evals_per_epoch": 4}, {"eval_strategy": "steps", "eval_steps": 0.25}),
        ({"base_model": "m", **NO_WARMUP, "evals_per_epoch": 1}, {"eval_strategy": "epoch"}),
        ({"base_model": "m", **NO_WARMUP, "train_on_inputs": True}, {"completion_only_loss": False}),
        ({"base_model": "m", **NO_WARMUP, "special_tokens": {"eos_token": "<end>"}}, {"eos_token": "<end>"}),
        ({"base_model": "m", **NO_WARMUP, "group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"stage": "sft"}, {"assistant_only_loss": True}),
        ({"stage": "sft", "train_on_prompt": True}, {"completion_only_loss": False}),
    ],
)  # fmt: skip
def test_what_the_loss_is_over_and_when_it_is_evaluated(
    values: dict[str, Any], wanted: dict[str, Any]
) -> None:
    made = convert(values)
    assert wanted.items() <= made.recipe["training"].items()
    assert not made.lost


def test_data_without_evaluation_is_trained_on_as_a_whole() -> None:
    values = {"val_set_size": 0, "eval_steps": 5, "save_steps": 5, "early_stopping_patience": 3}
    made = convert({"base_model": "m", **NO_WARMUP, **values})
    assert made.recipe["training"]["save_strategy"] == "steps"
    assert "eval_strategy" not in made.recipe["training"], "such a recipe would be refused"
    assert "early_stopping" not in made.recipe
    assert made.lost["eval_steps"] == (5, "there is no data to evaluate on")
    for values, fraction in (
        ({"base_model": "m"}, 0),
        ({"base_model": "m", **NO_WARMUP, "val_set_size": 0.1}, 0.1),
    ):
        assert convert(values).recipe["data"]["eval_fraction"] == fraction
    made = convert({"base_model": "m", **NO_WARMUP, "test_datasets": [{"path": "held.jsonl"}]})
    assert made.recipe["data"] == {"eval": "held.jsonl"}


def test_names_of_a_list_of_datasets_are_not_taken_for_those_of_the_hub() -> None:
    made = convert({"stage": "sft", "dataset": "identity,alpaca_en_demo"})
    assert "is not in data/dataset_info.json" in made.lost["dataset"][1]
    assert "train" not in made.recipe["data"]


def test_the_loss_is_that_of_the_datasets_that_are_kept(tmp_path: Path) -> None:
    listed = {
        "rows": {"file_name": "rows.json"},
        "chats": {"file_name": "chats.json", "formatting": "sharegpt"},
        "more": {"file_name": "more.json", "formatting": "sharegpt"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))

    def of(names: str) -> Any:
        return convert({"stage": "sft", "dataset": names, "dataset_dir": "."}, tmp_path)

    first = of("rows,chats")
    assert first.recipe["data"]["train"] == str(tmp_path / "rows.json")
    assert "chats.json" in first.lost["dataset"][1]
    assert "assistant_only_loss" not in first.recipe["training"]
    both = of("chats,more")
    assert both.recipe["data"]["mixture"] == [str(tmp_path / name) for name in ("chats.json", "more.json")]
    assert both.recipe["training"]["assistant_only_loss"]
    assert "convert again with dataset_dir=FOLDER" in of("elsewhere").lost["dataset"][1]


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, True),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, True),
        ({"instruction": "a", "output": "b"}, False),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_dataset_that_is_not_listed_is_named_on_the_command_line(
    row: Any, is_chat: bool, suffix: str, places: tuple[Path, Path], capsys: Any
) -> None:
    rows, theirs = places[1].with_name(f"rows{suffix}"), places[0].parent / "theirs.yaml"
    rows.write_text(json.dumps([row, row] if suffix == ".json" else row) + "\n")
    theirs.write_text(FACTORY.replace("MODEL", str(places[0])).replace("DATA", "identity"))
    ours = theirs.with_name("ours.yaml")
    words = ["convert-config", str(theirs), "--output", str(ours)]
    assert main(words) == 0
    assert "convert again with dataset_dir=FOLDER" in " ".join(capsys.readouterr().out.split())
    assert main([*words, f"dataset={rows}", "cutoff_len=64"]) == 0
    recipe = load_recipe(ours)
    assert (recipe.data.train, recipe.training["max_length"]) == (str(rows), 64)
    assert recipe.training.get("assistant_only_loss", False) is is_chat
    assert main([*words, "dataset"]) == 2
    assert "VALUE='dataset': write the name of the value as well" in capsys.readouterr().err
