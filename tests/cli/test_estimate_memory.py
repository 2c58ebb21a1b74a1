"""What a model takes, from its config alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import calculate_maximum_sizes
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, ViTConfig

from windlass.checkpoint.store import Store
from windlass.cli.command_line import in_words
from windlass.cli.estimate_memory import Training, build_empty, build_whole, estimate, plan_training
from windlass.cli.main import main

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
LORA: dict[str, Any] = {"lora_r": 2, "weights": "bfloat16", "precision": "bf16"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BertConfig(architectures=["BertForMaskedLM"], dtype="float16", **SIZES).save_pretrained(tmp_path)
    return tmp_path


def test_a_run_is_that_of_its_newest_checkpoint(folder: Path, tmp_path: Path) -> None:
    config = (folder / "config.json").read_bytes()
    Store(tmp_path / "run").write(3, {}, lambda staged: staged.write_file("config.json", config))
    assert type(build_empty(str(tmp_path / "run"))) is BertForMaskedLM


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
    assert json.loads(capsys.readouterr().out)["memory"]["peak"] > whole


def test_no_weights_are_made(folder: Path) -> None:
    model = build_empty(str(folder))
    assert all(param.is_meta for param in model.parameters())
    assert estimate(model, ["int8"])[0].cells()[3] == "-"


@pytest.mark.parametrize("case", ["missing/config.json", "other.json", "empty", "unknown_type", "no_type"])
def test_what_cannot_be_built(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown_type").mkdir()
    (tmp_path / "no_type").mkdir()
    (tmp_path / "no_type" / "config.json").write_text("{}")
    (tmp_path / "unknown_type" / "config.json").write_text(json.dumps({"model_type": "no such"}))
    assert main(["estimate-memory", str(tmp_path / case)]) == 2
    said = capsys.readouterr().err
    assert case.split("/")[0] in said
    assert case != "no_type" or "`windlass plan` predicts the memory of the script" in said


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["estimate-memory"], {"hidden_size": "x"}),
        (["estimate-memory"], {"hidden_size": 0}),
        (["prove", "--layout", "tp=2"], {"hidden_size": "x"}),
        (["prove", "--layout", "tp=2"], {"num_attention_heads": 0}),
    ],
)
def test_a_wrong_value_of_a_config_is_not_a_traceback(
    tmp_path: Path, words: list[str], wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **wrong}))
    assert main([*words, str(tmp_path / "config.json")]) == 2
    assert "Error: " in capsys.readouterr().err


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


def largest(name: str, **options: Any) -> dict[str, int]:
    """Of each kind of memory the most bytes."""
    training = Training(**{"batch_size": 2, "length": 16, **options})
    found: dict[str, int] = plan_training(lambda: build_whole(name), training).to_dict()["memory"]["largest"]
    return found


@pytest.fixture(scope="module")
def plain(llama: str) -> dict[str, int]:
    return largest(llama)


@pytest.fixture(scope="module")
def lora(llama: str) -> dict[str, int]:
    return largest(llama, **LORA)


def test_parts_of_a_training(llama: str, plain: dict[str, int]) -> None:
    count = sum(parameter.numel() for parameter in build_empty(llama).parameters())
    assert plain["weights"] == plain["gradients"] == 4 * count
    assert 8 * count <= plain["optimizer state"] < 8 * count + 1000
    assert largest(llama, batch_size=4)["activations"] > 1.9 * plain["activations"]
    assert largest(llama, recompute=True)["activations"] < plain["activations"] / 2


def test_bf16_copies_weights_and_has_smaller_activations(llama: str, plain: dict[str, int]) -> None:
    half = largest(llama, precision="bf16")
    matrices = sum(p.numel() for p in build_empty(llama).model.layers.parameters() if p.ndim == 2)
    assert half["weights"] == plain["weights"]
    assert half["copies of weights"] >= 2 * matrices
    assert half["activations"] < plain["activations"]


@pytest.mark.parametrize("sharding", ["full", pytest.param("grad", marks=pytest.mark.slow)])
def test_shards(llama: str, sharding: str, plain: dict[str, int]) -> None:
    found = largest(llama, num_processes=4, sharding=sharding)
    assert found["weights"] == plain["weights"] / 4
    assert found["gradients"] >= found["weights"]
    assert found["buckets"] > 0


def test_adapters(plain: dict[str, int], lora: dict[str, int]) -> None:
    assert lora["gradients"] < plain["gradients"] / 4
    assert plain["weights"] / 2 < lora["weights"] < plain["weights"]


@pytest.mark.parametrize(
    ("quantization", "bits"), [("nf4", 4.5), pytest.param("int8", 8, marks=pytest.mark.slow)]
)
def test_a_base_of_few_bits(llama: str, quantization: str, bits: float, lora: dict[str, int]) -> None:
    """Packed weights and their scales take the place of the linear layers, and leave the head and embeddings alone."""
    few = largest(llama, quantization=quantization, **LORA)
    packed = sum(p.numel() for p in build_empty(llama).model.layers.parameters() if p.ndim == 2)
    rows_of_int8 = 0 if quantization == "nf4" else 4 * 2 * (4 * 32 + 2 * 64 + 32)
    norms = 2 * 5 * 32  # kept in float32 under a base of few bits
    saved = lora["weights"] - few["weights"] - (few["buffers"] - lora["buffers"])
    assert saved == packed * (16 - bits) / 8 - rows_of_int8 - norms
    assert few["gradients"] == lora["gradients"]
    assert few["temporary"] > 0


def test_one_question_has_one_answer(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`windlass plan` of a script with the same model and batch predicts the same peak."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(config=llama, folder=tmp_path / "out"))
    assert main(["plan", str(script), "--device", "h100", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]
    assert main(["estimate-memory", llama, "--batch_size", "2", "--length", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == planned


SCRIPT = """\
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from windlass import Trainer, TrainingArguments

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("{config}"))
rows = [{{"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.zeros(16, dtype=torch.long)}}] * 4
given = {{"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "no", "report_to": "none"}}
args = TrainingArguments("{folder}", use_cpu=True, **given)
Trainer(model, args, train_dataset=rows).train()
"""


def test_the_detailed_table_is_printed(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch_size", "2", "--length", "16", "--precision", "bf16"]
    assert main(["estimate-memory", llama, *words]) == 0
    out = capsys.readouterr().out
    for said in ("weights", "activations", "copies of weights", "together", "Not counted", "stay in float32"):
        assert said in out
    assert max(map(len, out.splitlines())) < 120


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantization", "nf4"], "set --lora_r too"),
        (["--sharding", "full"], "set --num_processes too"),
        (["--lora_r", "0"], "--lora_r=0: must be at least 1"),
        (["--length", "0"], "--length=0: must be at least 1"),
        (["--dtypes", "int8"], "--dtypes='int8': chooses rows of the table without --batch_size"),
    ],
)
def test_what_does_not_fit_together(
    words: list[str], said: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate-memory", llama, "--batch_size", "2", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_stored_in_few_bits_needs_their_form(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((Path(llama) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["estimate-memory", str(tmp_path), "--batch_size", "2"]) == 2
    assert "--quantization=None: the weights of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--lora_r", "8"], ["--recompute"], ["--sharding", "full"], ["--length", "9"]]
)
def test_options_of_a_training_need_its_batch(
    words: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate-memory", llama, *words]) == 2
    assert f"--batch_size=None: is needed with {words[0]}" in capsys.readouterr().err


def test_rows_longer_than_a_table_of_positions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    assert main(["estimate-memory", str(tmp_path), "--batch_size", "2"]) == 2
    assert "--length=1024: the model has 128 positions" in capsys.readouterr().err


def test_a_model_of_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ViTConfig(architectures=["ViTForImageClassification"], hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, image_size=8, patch_size=4).save_pretrained(tmp_path)  # fmt: skip
    assert main(["estimate-memory", str(tmp_path), "--batch_size", "2"]) == 2
    assert "cannot be run on input_ids and labels" in capsys.readouterr().err


def test_a_config_without_a_class_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}'
    )
    assert main(["estimate-memory", str(path), "--batch_size", "1"]) == 2
    assert "names no class in `architectures`, so LlamaModel is made of it" in capsys.readouterr().err
