"""What a model takes, from its config alone."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import calculate_maximum_sizes
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, ViTConfig

from windlass.cli.estimate_memory import build_empty, builder, estimate, in_words
from windlass.cli.main import main
from windlass.cli.training_memory import TOGETHER, Training, training_rows

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BertConfig(architectures=["BertForMaskedLM"], dtype="float16", **SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_sizes_are_those_of_the_model(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole, (largest, _) = calculate_maximum_sizes(BertForMaskedLM(BertConfig(**SIZES)))
    assert main(["estimate-memory", str(folder / name), "--dtypes", "float32", "int4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BertForMaskedLM")
    assert re.split(r"\s{2,}", lines[2].strip())[-3:] == [
        in_words(largest),
        in_words(whole),
        in_words(whole * 4),
    ]
    assert lines[3].split()[-3:] == [*in_words(whole / 8).split(), "-"]


def test_all_dtypes_by_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("float32", "float16", "bfloat16", "int8", "int4"))


def test_sizes_for_programs_are_in_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, _ = calculate_maximum_sizes(BertForMaskedLM(BertConfig(**SIZES)))
    assert main(["estimate-memory", str(folder), "--dtypes", "float32", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"]["float32"]["training"] == whole * 4
    assert found["bytes"]["int4"] == {"dtype": "int4", "training": None} | {
        key: found["bytes"]["float32"][key] / 8 for key in ("largest_layer", "model")
    }
    assert main(["estimate-memory", str(folder), "--batch_size", "2", "--length", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["together"]["peak"] > whole


def test_no_weights_are_made(folder: Path) -> None:
    model = build_empty(str(folder))
    assert all(param.is_meta for param in model.parameters())
    assert estimate(model, ["int8"])[0].cells()[3] == "-"


@pytest.mark.parametrize("case", ["missing/config.json", "other.json", "empty", "unknown_type"])
def test_what_cannot_be_built(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown_type").mkdir()
    (tmp_path / "unknown_type" / "config.json").write_text(json.dumps({"model_type": "no such"}))
    assert main(["estimate-memory", str(tmp_path / case)]) == 2
    assert case.split("/")[0] in capsys.readouterr().err


def test_other_libraries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", str(folder), "--library_name", "timm"]) == 2
    assert "--library_name='timm'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40 * 3, "3 TiB")]
)
def test_bytes_in_words(size: int, text: str) -> None:
    assert in_words(size) == text


# --- training in detail


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    sizes = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 64}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return str(folder)


@functools.cache
def rows(name: str, **options: Any) -> dict[str, float]:
    """The bytes at most of each kind, and those of all at the peak."""
    found = training_rows(builder(name), Training(**{"batch": 2, "length": 16, **options}))
    return {row.kind: row.peak if row.kind == TOGETHER else row.most for row in found}


SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from windlass import Trainer, TrainingArguments

ids = torch.zeros(16, dtype=torch.long)
args = TrainingArguments("out", per_device_train_batch_size=2, max_steps=1, save_strategy="no", use_cpu=True, bf16=True)
model = LlamaForCausalLM(LlamaConfig.from_pretrained(NAME))
Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 2).train()
"""


def test_it_is_what_a_plan_says(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("NAME", repr(llama)))
    assert main(["plan", str(tmp_path / "script.py"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["memory"]
    words = ["--batch_size", "2", "--length", "16", "--precision", "bf16", "--json"]
    assert main(["estimate-memory", llama, *words]) == 0
    found = json.loads(capsys.readouterr().out)["bytes"]
    assert found.pop(TOGETHER)["peak"] == plan["peak"]
    assert {kind: size["most"] for kind, size in found.items()} == plan["largest"]


def test_parts_of_a_training(llama: str) -> None:
    count = sum(parameter.numel() for parameter in build_empty(llama).parameters())
    plain = rows(llama)
    assert plain["weights"] == plain["gradients"] == 4 * count
    assert plain["optimizer state"] == pytest.approx(8 * count, rel=0.01)
    assert rows(llama, batch=4)["activations"] > 1.9 * plain["activations"]
    assert rows(llama, recompute=True)["activations"] < plain["activations"] / 2
    half = rows(llama, precision="bf16")
    assert half["weights"] == plain["weights"]
    assert half["activations"] < plain["activations"]


def test_shards_and_adapters(llama: str) -> None:
    plain, full = rows(llama), rows(llama, processes=4, sharding="full")
    assert full["weights"] == pytest.approx(plain["weights"] / 4, rel=0.05)
    assert full["optimizer state"] == pytest.approx(plain["optimizer state"] / 4, rel=0.05)
    lora = rows(llama, lora_r=2, dtype="bfloat16", precision="bf16")
    assert lora["gradients"] < plain["gradients"] / 4
    assert plain["weights"] / 2 < lora["weights"] < plain["weights"]
    few = rows(llama, lora_r=2, dtype="bfloat16", precision="bf16", quantization="nf4")
    assert few["weights"] < lora["weights"]
    assert few["activations"] == lora["activations"]


def test_the_detailed_table_is_printed(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch_size", "2", "--length", "16", "--precision", "bf16"]
    assert main(["estimate-memory", llama, *words]) == 0
    out = capsys.readouterr().out
    for said in (
        "weights",
        "activations",
        "at the peak",
        "together",
        "Not counted",
        "stay in float32",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) < 120


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantization", "nf4"], "set --lora_r too"),
        (["--sharding", "full"], "set --num_processes too"),
        (["--lora_r", "0"], "--lora_r=0: must be at least 1"),
        (["--length", "0"], "--length=0: must be at least 1"),
    ],
)
def test_what_does_not_fit_together(
    words: list[str], said: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate-memory", llama, "--batch_size", "2", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--lora_r", "8"], ["--recompute"], ["--sharding", "full"], ["--length", "9"]]
)
def test_options_of_a_training_need_its_batch(
    words: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate-memory", llama, *words]) == 2
    assert f"--batch_size=None: is needed with {words[0]}" in capsys.readouterr().err


def test_a_model_of_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ViTConfig(architectures=["ViTForImageClassification"], hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, image_size=8, patch_size=4).save_pretrained(tmp_path)  # fmt: skip
    assert main(["estimate-memory", str(tmp_path), "--batch_size", "2"]) == 2
    assert "cannot be run on input_ids and labels" in capsys.readouterr().err
