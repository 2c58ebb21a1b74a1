"""Configurations of other programs become recipes with the meaning that they have there, defaults included."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.finetuning import small
from tests.said import said

from windlass.cli.convert_config import convert
from windlass.cli.main import main
from windlass.config.sections.setting import default_of
from windlass.core.errors import ConfigError
from windlass.finetuning.sft_config import SFTConfig
from windlass.recipes.recipe import check_draft, load_recipe, read_draft
from windlass.recipes.tuning_data import load_tuning_data

__all__ = ["said"]
pytest.importorskip("transformers")

# What a file of each program must have.
LEAST: dict[str, dict[str, Any]] = {
    "Axolotl": {"base_model": "m", "learning_rate": 1e-4},
    "LLaMA-Factory": {"model_name_or_path": "m", "stage": "sft"},
    "TRL": {"model_name_or_path": "m", "use_peft": True},
}
# The documented defaults of the programs, as keys of a recipe; the files that they are from are named in the modules.
DEFAULTS: dict[str, dict[str, Any]] = {
    "Axolotl": {
        "max_length": 512, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine", "gradient_checkpointing": False, "save_strategy": "epoch", "save_total_limit": 4,
        "bf16": True, "warmup_steps": 0.03, "gradient_accumulation_steps": 1, "weight_decay": 0.0, "packing": False,
        "optim": "adamw_torch_fused", "eval_strategy": "no",
    },
    "LLaMA-Factory": {
        "max_length": 2048, "learning_rate": 5e-5, "logging_steps": 500, "bf16": False, "packing": False,
        "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "warmup_steps": 0, "lr_scheduler_type": "linear",
        "gradient_checkpointing": True, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 500,
    },
}  # fmt: skip


def effective(made: Any, name: str) -> Any:
    """The value that training has: that of the recipe, else Windlass's default."""
    own = {item.name: default_of(item) for item in dataclasses.fields(SFTConfig)}
    return made.recipe.get("training", {}).get(name, own[name])


@pytest.mark.parametrize("program", DEFAULTS)
def test_documented_defaults_are_carried_over(program: str) -> None:
    made = convert(LEAST[program])
    assert made.program == program
    assert {name: effective(made, name) for name in DEFAULTS[program]} == DEFAULTS[program]


def test_defaults_of_trl() -> None:
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    own = {item.name: default_of(item) for item in dataclasses.fields(SFTConfig)}
    theirs = {
        item.name: item.default if item.default is not dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(trl.SFTConfig)
    }
    assert {name: own[name] for name in theirs} == theirs, "so no default of SFTConfig has to be carried over"
    model = trl.ModelConfig(use_peft=True)
    made = convert({"model_name_or_path": "m", "use_peft": True})
    ours = peft.LoraConfig(**made.recipe["adapter"])
    assert ours.to_dict() == trl.get_peft_config(model).to_dict()
    assert made.recipe["model"].get("dtype", "float32") == model.dtype


@pytest.mark.parametrize(
    ("values", "adapter"),
    [
        ({}, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
        ({"lora_rank": 32}, {"r": 32, "lora_alpha": 64}),
        ({"lora_rank": 4, "lora_alpha": 4}, {"r": 4, "lora_alpha": 4}),
        ({"lora_target": "q_proj, v_proj"}, {"target_modules": ["q_proj", "v_proj"]}),
        ({"pissa_init": True, "pissa_iter": -1}, {"init_lora_weights": "pissa"}),
    ],
)
def test_adapters_of_llama_factory(values: dict[str, Any], adapter: dict[str, Any]) -> None:
    made = convert({"stage": "sft", **values})
    assert adapter.items() <= made.recipe["adapter"].items()
    assert not made.lost


def test_a_decomposition_that_is_drawn_is_replaced_by_the_exact_one() -> None:
    """Training refuses the other: its saved adapter fits no base that can be loaded."""
    made = convert({"stage": "sft", "pissa_init": True})
    assert made.recipe["adapter"]["init_lora_weights"] == "pissa"
    assert list(made.lost) == ["pissa_iter"]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"dataset_name": "d", "dataset_streaming": True, "max_steps": 9}, True),
        ({"datasets": [{"path": "a.jsonl"}], "streaming": True, "max_steps": 9}, True),
        ({"dataset_name": "d", "dataset_streaming": True}, False),
        ({"dataset_name": "d", "streaming": True, "max_steps": 9, "test_split_size": 0.1}, False),
        ({"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "streaming": True, "max_steps": 9}, False),
    ],
)
def test_data_that_are_streamed(values: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    made = convert({**LEAST["TRL"], **values})
    assert made.recipe["data"].get("streaming", False) == kept
    assert any("streaming" in name for name in made.lost) != kept
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(made.recipe))
    check_draft(read_draft(recipe), opens_files=False)


@pytest.mark.parametrize("program", LEAST)
def test_every_key_that_is_not_read_is_listed(program: str) -> None:
    strange = {f"strange_{number}": number for number in range(5)}
    made = convert({**LEAST[program], **strange, "without_value": None})
    assert strange.keys() <= made.lost.keys()
    assert "without_value" not in made.lost


def test_so_are_keys_of_datasets(tmp_path: Path) -> None:
    item = {
        "path": "a.jsonl",
        "shards": 3,
        "type": {"field_instruction": "q", "strange": 1},
        "train_on_eos": "all",
    }
    made = convert({**LEAST["Axolotl"], "datasets": [item]})
    assert {"datasets.shards", "datasets.type.strange", "datasets.train_on_eos"} <= made.lost.keys()
    (tmp_path / "data").mkdir()
    listed = {"one": {"file_name": "a.json", "columns": {"history": "h"}, "ranking": True}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    made = convert({**LEAST["LLaMA-Factory"], "dataset": "one"}, tmp_path)
    assert {"dataset_info.one.columns.history", "dataset_info.one.ranking"} <= made.lost.keys()
    assert made.get("data.train") == str(tmp_path / "data" / "a.json"), (
        "files lie beside the list that names them"
    )


@pytest.mark.parametrize(
    ("program", "key", "value"),
    [
        ("TRL", "datasets", [{"split": "train"}]),
        ("TRL", "datasets", ["a.jsonl"]),
        ("TRL", "dataset_name", 3),
        ("LLaMA-Factory", "lora_rank", {}),
        ("LLaMA-Factory", "flash_attn", ["fa2"]),
        ("LLaMA-Factory", "interleave_probs", "half, half"),
        ("Axolotl", "special_tokens", ["<pad>"]),
    ],
)
def test_a_value_of_another_type_is_refused(program: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="of another type"):
        convert({**LEAST[program], key: value})


def test_trackers_and_early_stopping() -> None:
    names = {
        "wandb_project": "mine",
        "wandb_name": "first",
        "wandb_entity": "us",
        "early_stopping_patience": 3,
    }
    made = convert({**LEAST["Axolotl"], **names})
    wanted = {"report_to": ["wandb"], "project": "mine", "run_name": "first"}
    assert wanted.items() <= made.recipe["training"].items()
    assert "WANDB_ENTITY" in made.lost["wandb_entity"][1]
    patience = made.recipe.get("early_stopping") or made.lost["early_stopping"][0]
    assert patience == {"patience": 3}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (
            {**LEAST["LLaMA-Factory"], "use_swanlab": True, "report_to": "none"},
            {"training.report_to": ["swanlab"], "training.project": "llamafactory"},
        ),
        (
            {**LEAST["LLaMA-Factory"], "use_swanlab": True, "report_to": "wandb", "swanlab_run_name": "first"},
            {"training.report_to": ["wandb", "swanlab"], "training.run_name": "first"},
        ),
        (
            {**LEAST["LLaMA-Factory"], "flash_attn": "fa3", "warmup_ratio": 0.1, "warmup_steps": 0},
            {"training.warmup_steps": 0.1,
             "training.model_init_kwargs.attn_implementation": "flash_attention_3"},
        ),
        (
            {**LEAST["LLaMA-Factory"], "neat_packing": True, "use_dft_loss": True, "disable_shuffling": True,
             "disable_gradient_checkpointing": True},
            {"training.packing": True, "training.loss_type": "dft", "training.gradient_checkpointing": False,
             "training.train_sampling_strategy": "sequential"},
        ),
        (
            {**LEAST["LLaMA-Factory"], "quantization_bit": 4, "double_quantization": False, "fp16": True},
            {"quantization": "nf4", "model.dtype": "float16"},
        ),
        (
            {**LEAST["TRL"], "dataset_name": "org/rows", "dataset_config": "c", "eval_strategy": "epoch"},
            {"data.train": "org/rows", "data.subset": "c", "data.eval_split": "test"},
        ),
        (
            {**LEAST["Axolotl"], "datasets": [{"path": "a.jsonl", "type": "chat_template", "field_tools": "calls"}]},
            {"data.rename": {"calls": "tools"}},
        ),
    ],
)  # fmt: skip
def test_words_of_the_programs(values: dict[str, Any], wanted: dict[str, Any]) -> None:
    made = convert(values)
    assert {key: made.get(key) for key in wanted} == wanted
    assert not values.keys() & made.lost.keys()


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({**LEAST["LLaMA-Factory"], "quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        ({**LEAST["LLaMA-Factory"], "quantization_bit": 3}, "quantization_bit"),
        ({**LEAST["LLaMA-Factory"], "finetuning_type": "freeze"}, "finetuning_type"),
        ({**LEAST["TRL"], "datasets": [{"path": "a.json", "columns": ["q"]}]}, "datasets.columns"),
        ({**LEAST["TRL"], "load_in_4bit": True, "use_bnb_nested_quant": True}, "use_bnb_nested_quant"),
        ({**LEAST["TRL"], "dataset_name": "a.json", "eval_strategy": "epoch"}, "eval_strategy"),
        ({**LEAST["Axolotl"], "adapter": "ia3"}, "adapter"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_say_is_listed(values: dict[str, Any], lost: str) -> None:
    assert lost in convert(values).lost


@pytest.mark.parametrize(
    ("values", "mixture"),
    [
        ({**LEAST["Axolotl"], "datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}, ["a.jsonl", "b.jsonl"]),
        ({**LEAST["LLaMA-Factory"], "dataset": "a.json,b.json"}, ["a.json", "b.json"]),
        (
            {**LEAST["LLaMA-Factory"], "dataset": "a.json,b.json", "mix_strategy": "interleave_under",
             "interleave_probs": "0.3,0.7"},
            {"a.json": 0.3, "b.json": 0.7},
        ),
        (
            {**LEAST["TRL"], "datasets": [{"path": "a.json", "fraction": 0.2}, {"path": "b.json", "fraction": 0.8}]},
            {"a.json": 0.2, "b.json": 0.8},
        ),
    ],
)  # fmt: skip
def test_several_datasets_are_a_mixture(values: dict[str, Any], mixture: Any) -> None:
    made = convert(values)
    assert made.recipe["data"]["mixture"] == mixture
    assert not {"datasets", "dataset"} & made.lost.keys()


def rows_of(values: dict[str, Any], folder: Path) -> list[Any]:
    """The rows that the recipe of a configuration trains on."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(convert(values, folder).recipe))
    return list(load_tuning_data(load_recipe(path, ["training.use_cpu=true"]), seed=1).train)


def test_types_of_datasets_of_the_users_own(tmp_path: Path) -> None:
    model, data = small.saved(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text('{"q": "one", "hint": "two", "a": "1"}\n{"q": "old", "hint": "", "a": "2"}\n')
    kind = {
        "system_prompt": "be {brief}", "field_instruction": "q", "field_input": "hint", "field_output": "a",
        "format": "[{instruction}|{input}]", "no_input_format": "[{instruction}]",
    }  # fmt: skip
    values = {**LEAST["Axolotl"], "base_model": model, "datasets": [{"path": str(data), "type": kind}]}
    assert rows_of(values, tmp_path) == [
        {"prompt": "be {brief}[one|two]", "completion": "1"},
        {"prompt": "be {brief}[old]", "completion": "2"},
    ]


def test_conversations_under_other_names(tmp_path: Path) -> None:
    model, data = small.saved(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text('{"dialog": [{"who": "customer", "text": "one"}, {"who": "agent", "text": "two"}]}\n')
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    dataset = {
        "path": str(data), "type": "chat_template", "field_messages": "dialog",
        "message_property_mappings": {"role": "who", "content": "text"},
        "roles": {"user": ["customer"], "assistant": ["agent"]},
    }  # fmt: skip
    values = {**LEAST["Axolotl"], "base_model": model, "datasets": [dataset]}
    assert [row["messages"] for row in rows_of(values, tmp_path)] == [messages]
    assert convert(values).recipe["training"]["assistant_only_loss"] is True
    listed = {
        "file_name": "data.jsonl", "formatting": "sharegpt", "columns": {"messages": "dialog"},
        "tags": {"role_tag": "who", "content_tag": "text", "user_tag": "customer", "assistant_tag": "agent"},
    }  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": listed}))
    values = {
        **LEAST["LLaMA-Factory"],
        "model_name_or_path": model,
        "dataset": "mine",
        "dataset_dir": str(tmp_path),
    }
    assert [row["messages"] for row in rows_of(values, tmp_path)] == [messages]


AXOLOTL = """\
base_model: MODEL
datasets:
  - path: FOLDER/prompts.jsonl
    type: {field_instruction: prompt, field_output: completion, format: "{instruction} "}
val_set_size: 0.2
output_dir: FOLDER/axolotl
adapter: lora
sequence_len: 64
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
learning_rate: 0.0002
bf16: auto
evals_per_epoch: 1
saves_per_epoch: 1
"""
FACTORY = """\
model_name_or_path: MODEL
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: demo
dataset_dir: FOLDER
template: llama3
cutoff_len: 64
overwrite_cache: true
output_dir: FOLDER/factory
per_device_train_batch_size: 4
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: epoch
"""
TRL = """\
model_name_or_path: MODEL
dataset_name: FOLDER/chats.jsonl
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 64
per_device_train_batch_size: 4
use_peft: true
lora_r: 32
lora_alpha: 16
output_dir: FOLDER/trl
"""


@pytest.mark.parametrize("text", [AXOLOTL, FACTORY, TRL], ids=["axolotl", "llama-factory", "trl"])
def test_the_output_trains_without_a_warning(
    text: str, tmp_path: Path, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    for name, rows in {"prompts": small.prompts(20), "chats": small.chats(20)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "prompt", "response": "completion"}
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"demo": {"file_name": "prompts.jsonl", "columns": columns}})
    )
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(text.replace("MODEL", small.saved(tmp_path / "model")).replace("FOLDER", str(tmp_path)))
    assert main(["convert-config", str(theirs), "--output", str(ours)]) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        assert main(["train", str(ours), "training.use_cpu=true", "training.disable_tqdm=true"]) == 0
    about_the_machine = ("load average", "waiting for a core")
    ignored = ("is_gradient_checkpointing", *about_the_machine)
    assert [message for message in said if not any(part in message for part in ignored)] == []
