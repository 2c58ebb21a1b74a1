"""What a model takes, from its config alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from accelerate.utils import calculate_maximum_sizes
from transformers import BertConfig, BertForMaskedLM

from windlass.cli.estimate_memory import build_empty, estimate, in_words
from windlass.cli.main import main

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


def test_no_weights_are_made(folder: Path) -> None:
    model = build_empty(str(folder))
    assert all(param.is_meta for param in model.parameters())
    assert estimate(model, ["int8"])[0][3] == "-"


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
