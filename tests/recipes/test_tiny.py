"""`windlass train --tiny`: each built-in recipe runs in seconds, as the recipe that it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.dist.launch import launch, run_script

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from windlass.cli.main import main
from windlass.core.errors import ConfigError
from windlass.recipes.built_in_recipes import CHAT, ROWS, names
from windlass.recipes.recipe import load_recipe

NEEDS = {
    "digits": "sklearn",
    "sft-images": "sklearn",
    "translate-multi30k": "sacrebleu",
    "sft-lora": "peft",
    "sft-gsm8k": "peft",
    "dpo": "peft",
    "kto": "peft",
    "sft-qlora": "bitsandbytes",
    "qlora-gsm8k": "bitsandbytes",
    "sft-zero3": "deepspeed",
}
FAMILIES = {
    "classify": "qwen3",
    "dpo": "qwen3",
    "kto": "qwen3",
    "reward": "qwen3",
    "pretrain-stream": "llama",
    "sft-fsdp": "qwen3",
    "sft-full": "llama",
    "sft-lora": "gemma3_text",
    "sft-qlora": "llama",
    "sft-zero3": "llama",
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# One of each task and method; `make test-all` runs the others.
OFTEN = ("classify", "pretrain-stream", "sft-lora", "sft-fsdp", "sft-zero3", "digits")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in names()]
)
def test_each_built_in_recipe_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    said = run_script("windlass", "train", name, "--tiny", cwd=tmp_path)
    run = tmp_path / "runs" / f"{name}-tiny"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert {2, 4} <= {row["step"] for row in rows if "eval_loss" in row}
    assert (run / "checkpoint-4" / "manifest.json").is_file()
    assert f"Model       {FAMILIES.get(name, '')}" in said


@pytest.mark.parametrize("name", FAMILIES)
def test_families_and_methods_stay(name: str) -> None:
    full, tiny = load_recipe(name), load_recipe(name, tiny=True)
    assert full.model.model_type == FAMILIES[name]
    config = tiny.model.config or (tiny.base and tiny.base.config)
    assert config
    assert config["model_type"] == FAMILIES[name]
    assert config["num_hidden_layers"] == 2
    assert tiny.model.name is None
    for key in ("task", "adapter", "quantization", "parallel", "early_stopping"):
        assert getattr(tiny, key) == getattr(full, key), key
    assert tiny.data.streaming == full.data.streaming
    for key in ("packing", "assistant_only_loss", "gradient_checkpointing", "learning_rate"):
        assert tiny.training.get(key) == full.training.get(key), key
    assert tiny.training["output_dir"] == f"runs/{name}-tiny"


def test_what_the_command_line_sets_stays() -> None:
    chosen = [
        "training.max_steps=9",
        "data.block_size=32",
        "model.config.hidden_size=96",
        "training.output_dir=x",
    ]
    recipe = load_recipe("python-docs", chosen, tiny=True)
    assert (recipe.training["max_steps"], recipe.data.block_size, recipe.training["output_dir"]) == (
        9,
        32,
        "x",
    )
    assert recipe.model.config == {
        **(load_recipe("python-docs").model.config or {}),
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("task: [sft]\n", "task"),
        ("task: sft\ndata: {mixture: 5}\n", "data.mixture"),
        ("task: sft\nbase: {config: [1]}\n", "base.config"),
        ("model: {config: [1]}\n", "model.config"),
        ("training: 3\n", "training"),
        ("task: sft\ndata: 3\n", "data"),
    ],
)
def test_values_of_other_types_are_reported(text: str, field: str) -> None:
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe("mine.yaml", tiny=True)
    assert field in [problem.field.rpartition(": ")[2] for problem in caught.value.problems]


def test_data_that_is_here_is_read(tmp_path: Path) -> None:
    Path("mine.tsv").write_text("".join(f"text {n}\tclass{n % 2}\n" for n in range(100)))
    Path("mine.yaml").write_text(
        "task: classification\ndata: {train: mine.tsv, columns: [text, label]}\nmodel: gpt2\n"
    )
    mine = load_recipe("mine.yaml", ["model.model_type=gpt2"], tiny=True)
    assert (mine.data.train, mine.data.max_samples, mine.data.columns) == ("mine.tsv", 48, ["text", "label"])
    sizes = {"n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4}
    sizes |= {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}  # other names of the same
    assert mine.model.config == {"model_type": "gpt2", **sizes}
    Path("mine.tsv").unlink()
    assert load_recipe("mine.yaml", ["model.model_type=gpt2"], tiny=True).data.train == str(ROWS)
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe("mine.yaml", ["model.model_type=gpt2", "data.train=mine.tsv"], tiny=True)


def test_tokens_of_the_tokenizer_that_is_replaced_are_left_out() -> None:
    Path("mine.yaml").write_text(
        "task: sft\ndata: owner/chats\nmodel: owner/model\ntraining: {eos_token: <end>, pad_token: <pad>}\n"
    )
    chosen = ["model.model_type=qwen3", "training.pad_token=<other>"]
    training = load_recipe("mine.yaml", chosen, tiny=True).training
    assert ("eos_token" in training, training["pad_token"]) == (False, "<other>")


def test_rows_have_the_form_that_the_recipe_names() -> None:
    assert load_recipe("sft-lora", tiny=True).data.train == str(CHAT)
    pairs = load_recipe("sft-gsm8k", tiny=True).data
    assert (pairs.train, pairs.prompt_column, pairs.completion_column) == (str(ROWS), "text", "target")
    assert load_recipe("pretrain-stream", tiny=True).data.train == str(ROWS)


def test_the_type_of_a_named_model_is_read_from_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MistralConfig

    MistralConfig(hidden_size=4096).save_pretrained(tmp_path / "model")
    recipe = load_recipe("sft-lora", ["model=model"], tiny=True)
    assert recipe.base is not None
    assert (recipe.base.config["model_type"], recipe.base.config["hidden_size"]) == ("mistral", 64)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"model.name='owner/absent': its type .* set model.model_type, such as"
    ):
        load_recipe("sft-lora", ["model=owner/absent"], tiny=True)


def test_another_type_than_the_recipe_says_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.finetuning import small
    from transformers import MistralConfig

    small.saved(tmp_path / "model")
    MistralConfig().save_pretrained(tmp_path / "model")
    for recipe, words in (("sft-full", [f"data.train={CHAT}"]), ("classify", [f"data.train={ROWS}"])):
        words += ["model=model", "model.model_type=llama", "training.use_cpu=true"]
        assert main(["train", recipe, *words]) == 2
        assert "model.model_type='llama': model is of type mistral" in capsys.readouterr().err


def test_attention_that_needs_a_gpu_is_left_out() -> None:
    asked = "training.model_init_kwargs.attn_implementation=flash_attention_2"
    for tiny in (True, False):
        options = load_recipe("sft-lora", [asked, f"data.train={CHAT}"], tiny=tiny).training[
            "model_init_kwargs"
        ]
        assert ("attn_implementation" in options) != tiny


def test_the_printed_recipe_is_the_tiny_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "shakespeare", "--tiny", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["training"]["max_steps"], printed["data"]["format"]) == (4, "python-docs")


@pytest.mark.dist
def test_a_sharded_recipe_on_two_processes(tmp_path: Path) -> None:
    said = launch(2, "windlass", "train", "sft-fsdp", "--tiny", cwd=tmp_path)
    assert (tmp_path / "runs" / "sft-fsdp-tiny" / "checkpoint-4" / "model.parts.json").is_file(), said


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["training.fsdp=full_shard", "parallel.mesh.tp=2"])
def test_a_base_is_trained_for_an_adapter_that_answers_in_any_layout(tmp_path: Path, layout: str) -> None:
    pytest.importorskip("peft")
    few = ["training.max_steps=1", "base.max_steps=1"]
    said = launch(2, "windlass", "train", "sft-lora", "--tiny", layout, *few, cwd=tmp_path)
    assert "after          Name three primary colours." in said


def test_a_run_that_stops_early_is_complete(tmp_path: Path) -> None:
    words = [
        "early_stopping.patience=1",
        "early_stopping.threshold=100",
        "training.max_steps=8",
        "training.eval_steps=1",
    ]
    said = run_script(
        "windlass", "train", "python-docs", "--tiny", *words, "training.save_steps=1", cwd=tmp_path
    )
    rows = (tmp_path / "runs/python-docs-tiny/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row).get("step", 0) for row in rows) == 2
    assert "Interrupted" not in said
    assert "eval loss" in said
