"""`windlass explain`: where a value comes from, whatever it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.cli.explain import find_key
from windlass.cli.main import main


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
    assert find_key(word).name == name


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


def test_an_unknown_setting_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "num_procesess"]) == 2
    assert "did you mean 'num_processes'" in capsys.readouterr().err


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
