"""`windlass explain`: where a value comes from, whatever it is called."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from windlass.cli.explain import _PAGES, find_setting
from windlass.cli.main import main
from windlass.recipes.argument_table import all_arguments


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize(("word", "name"), [
    ("precision", "precision"), ("--mixed_precision", "precision"), ("mixed-precision", "precision"),
    ("ACCELERATE_MIXED_PRECISION", "precision"), ("bf16", "precision"), ("TrainingArguments.use_cpu", "cpu"),
    ("fsdp_config.fsdp_offload_params", "fsdp.cpu_offload"), ("parallel.fsdp.cpu_offload", "fsdp.cpu_offload"),
    ("FSDP_TRANSFORMER_CLS_TO_WRAP", "fsdp.layers"), ("num_processes", "launch.processes"),
    ("zero_stage", "deepspeed.zero_stage"),
])  # fmt: skip
def test_every_spelling_is_found(word: str, name: str) -> None:
    key = find_setting(word)
    assert key is not None
    assert key.name == name


@pytest.mark.parametrize(("word", "names"), [
    ("role", ["launch.role", "data.messages.role"]), ("data.messages.role", ["data.messages.role"]),
    ("debug", ["debug", "training.debug"]), ("TrainingArguments.debug", ["training.debug"]),
    ("training.ddp_timeout", ["ddp.timeout"]),
])  # fmt: skip
def test_a_name_of_a_setting_and_of_an_argument_is_both(
    word: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one["name"] for one in as_json(capsys, word)] == names


def test_value_origin_and_what_gave_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("mixed_precision: fp16\n")
    assert main(["explain", "precision", "--config_file", str(file), "--mixed_precision", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'precision = "bf16"'
    assert lines[1].split() == ["from", "--mixed_precision"]
    assert lines[2].split()[:3] == ["over", '"fp16"', "from"]
    assert str(file) in lines[2]


def test_defaults_and_everything_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tee"]) == 0
    assert "its default" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert "no settings given" in capsys.readouterr().out
    assert main(["explain", "--use_fsdp", "--num_processes", "two"]) == 0
    said = capsys.readouterr().out
    assert 'strategy = "fsdp"  # --use_fsdp' in said
    assert "problem: --num_processes='two': must be a whole number" in said


def test_a_recipe_and_its_launcher_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    text = tmp_path / "x.txt"
    text.write_text("some text\n")
    model = "model: {config: {model_type: gpt2}}\ntokenizer: {train: {}}\n"
    recipe.write_text(f"data: {text}\n{model}parallel: {{precision: bf16}}\n")
    assert main(["explain", "bf16", "--recipe", str(recipe), "--mixed_precision", "fp16"]) == 0
    said = capsys.readouterr().out
    assert "TrainingArguments.bf16" in said
    assert "contradicts --mixed_precision='fp16'" in said
    # What is set is set by someone, and not a default of the arguments.
    found = as_json(capsys, "--recipe", str(recipe))
    assert {one["name"] for one in found["settings"]} >= {"precision", "model.config"}
    assert not {one["name"] for one in found["settings"]} & {"accumulation", "ddp.timeout"}


def test_an_unknown_setting_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "num_procesess"]) == 2
    assert "NAME='num_procesess': there is no such argument or setting; did you mean 'num_processes'" in (
        capsys.readouterr().err
    )
    assert main(["explain", "learnign_rate"]) == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What is printed of the first argument, by the word at the beginning of the line; the first line is under ""."""
    assert main(["explain", *words]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    own = itertools.takewhile(lambda line: line.startswith("  "), lines)
    return {"": first} | {line.split()[0]: line[11:].strip() for line in own}


@pytest.mark.parametrize(
    ("word", "first", "has"),
    [
        (
            "weight_decay",
            "training.weight_decay = 0.0",
            {"type": "a number; must be at least 0", "from": "its default"},
        ),
        (
            "eval-strategy",
            'training.eval_strategy = "no"',
            {"values": "no, steps, epoch", "page": "docs/training.md"},
        ),
        ("evaluation_strategy", 'training.eval_strategy = "no"', {"earlier": "evaluation_strategy"}),
        (
            "TrainingArguments.seed",
            "training.seed = 42",
            {"type": "a whole number", "python": "TrainingArguments.seed"},
        ),
        ("packing", "training.packing = false", {"tasks": "sft", "python": "SFTConfig.packing"}),
        (
            "block_size",
            "data.block_size = 256",
            {"tasks": "causal-lm, masked-lm", "recipe": "data.block_size"},
        ),
        (
            "tokenizer.train.algorithm",
            'tokenizer.train.algorithm = "auto"',
            {"values": "auto, bpe, wordpiece"},
        ),
        ("quantization", "quantization = null", {"type": "text or null", "values": "nf4, fp4, int8"}),
        ("hub_token", "training.hub_token = null", {"page": "docs/checkpoints.md, docs/hub.md"}),
        ("logging_nan_inf_filter", "training.logging_nan_inf_filter = true", {"but": "filters nothing"}),
        ("sample.max_new_tokens", "sample.max_new_tokens = 40", {"tasks": "causal-lm, seq2seq, sft"}),
    ],
)
def test_any_argument_is_explained(
    word: str, first: str, has: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(capsys, word)
    assert shown[""] == first
    for name, text in has.items():
        assert shown[name].startswith(text)
    assert shown["means"]


def test_every_key_of_a_recipe_has_a_description_a_type_and_a_page() -> None:
    pages = {page for listed in _PAGES.values() for page in listed.split(", ")}
    assert all((Path(__file__).parents[2] / "docs" / page).is_file() for page in {*pages, "recipes.md"})
    objects = ("parallelism_config", "generation_config")  # of other libraries
    for argument in all_arguments():
        section = argument.field.default_factory is not dataclasses.MISSING and len(argument.keys) == 1
        assert argument.doc or section, argument.dotted
        assert argument.type_in_words() or section or argument.keys[-1] in objects, argument.dotted


def test_a_section_is_explained_with_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sample", "--recipe", "python-docs", "sample.prompt=Once"]) == 0
    name, _, value = capsys.readouterr().out.splitlines()[0].partition(" = ")
    assert (name, json.loads(value)["prompt"]) == ("sample", "Once")
    assert main(["explain", "sample", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["value"] == {"prompt": None, "max_new_tokens": 40, "temperature": 0.8}


def test_a_name_without_a_successor_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "past_index"]) == 0
    assert capsys.readouterr().out == "past_index is gone: no state is carried from batch to batch\n"


def test_an_argument_of_a_recipe_whose_data_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "task: sft\ndata: no/such.jsonl\nmodel: ./no-such-model\ntraining:\n  learning_rate: 1e-3\n  warmup_steps: 5\n"
    )
    words = ["--recipe", str(recipe), "training.warmup_steps=7"]
    shown = explained(capsys, "learning_rate", *words)
    assert (shown[""], shown["from"], shown["default"]) == (
        "training.learning_rate = 0.001", f"{recipe}:5", "2e-05"
    )  # fmt: skip
    assert explained(capsys, *words, "warmup_steps")["from"] == "the command line"
    assert explained(capsys, "data.train", *words)["from"] == f"{recipe}:2"
    assert explained(capsys, "training.seed", *words)["from"] == "its default"
    assert explained(capsys, "output_dir", *words)["from"] == "derived from other keys, or set by the task"
    assert main(["explain", *words]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert f"training.learning_rate = 0.001  # {recipe}:5" in listed
    assert "training.warmup_steps = 7  # the command line" in listed
    assert f'model.name = "./no-such-model"  # {recipe}:3' in listed
    assert not any("output_dir" in line or "log_level" in line for line in listed)


def test_a_recipe_with_a_mistake_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("data: no/such.txt\ntraining: {learnign_rate: 1}\n")
    assert main(["explain", "seed", "--recipe", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert "did you mean training.learning_rate?" in said or "did you mean 'learning_rate'?" in said
    assert "no such file" not in said


@pytest.mark.parametrize("words", [["seed", "max_steps"], ["seed", "x=1"]])
def test_words_that_do_not_fit(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *words])
    assert capsys.readouterr().err.startswith("windlass explain: ")


def test_the_dtypes_of_a_run_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "precision", "--mixed_precision", "bf16", "--use_fsdp"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  dtypes")]
    assert line.endswith(
        "master weights as the model is loaded, computation bfloat16, reduction of gradients float32"
    )


def test_each_value_of_a_configuration_of_deepspeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto", '
        '"train_batch_size": "auto"}'
    )
    assert main(["explain", "deepspeed.config", "--use_deepspeed", "--deepspeed_config_file", str(file)]) == 0
    said = capsys.readouterr().out
    assert "from      --deepspeed_config_file" in said
    assert "  value     zero_optimization.stage = 3\n" in said
    assert 'zero_optimization.reduce_bucket_size = "auto"  # the hidden_size of the model' in said
    assert 'gradient_clipping = "auto"  # max_grad_norm' in said
    assert "per_device_train_batch_size x gradient_accumulation_steps x processes" in said


@pytest.mark.parametrize(
    ("name", "owner"),
    [("adapter.r", "peft.LoraConfig"), ("model.config.hidden_size", "config in transformers")],
)
def test_keys_of_other_libraries_are_documented_there(
    name: str, owner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 2
    said = capsys.readouterr().err
    assert owner in said
    assert "documents it" in said


def test_the_place_of_each_process_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--parallelism_config_tp_size", "2", "--parallelism_config_cp_size", "2"]
    assert main(["explain", "--num_processes", "8", *sizes]) == 0
    out = capsys.readouterr().out
    assert "layout: 8 processes = replicate 2 x context 2 x tensor 2" in out
    assert "rank 6: replicate 1, context 1, tensor 0" in out
    assert main(["explain", "--num_processes", "6", *sizes]) == 0
    assert "must divide the number of processes, which is 6" in capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["explain", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_facts_for_programs_are_those_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("learning_rate", "precision", "text_column", "past_index"):
        found = as_json(capsys, word)
        assert main(["explain", word]) == 0
        printed = capsys.readouterr().out
        assert found
        for one in found:
            assert one["name"] in printed
            for said in one["facts"].values():
                assert all(text in printed for text in ([said] if isinstance(said, str) else said))
    rate, _ = as_json(capsys, "learning_rate")  # and that of a base
    assert rate["value"] == 5e-5
    assert rate["facts"]["SFTConfig"] == "2e-05"
    assert rate["facts"]["page"] == ["docs/training.md", "docs/optimizers.md"]
    file = tmp_path / "my.yaml"
    file.write_text("mixed_precision: fp16\n")
    found = as_json(capsys, "--config_file", str(file), "--num_processes", "2")
    (precision,) = (one for one in found["settings"] if one["name"] == "precision")
    assert precision["value"] == "fp16"
    assert str(file) in precision["from"]
    assert found["problems"] == []
