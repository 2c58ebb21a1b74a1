"""Adapters, quantization and datasets that flags describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from windlass.core.errors import ConfigError, DataError


def test_adapters_from_flags() -> None:
    pytest.importorskip("peft")
    assert get_peft_config(ModelConfig()) is None
    found = get_peft_config(
        ModelConfig(use_peft=True, lora_r=4, use_dora=True, lora_target_modules=["q_proj", "k_proj"])
    )
    assert (found.r, found.lora_alpha, found.bias, found.use_dora) == (4, 32, "none", True)
    assert found.target_modules == {"q_proj", "k_proj"}


def test_quantization_from_flags() -> None:
    pytest.importorskip("transformers")
    assert get_quantization_config(ModelConfig()) is None
    four = get_quantization_config(
        ModelConfig(load_in_4bit=True, use_bnb_nested_quant=True, dtype="bfloat16")
    )
    assert four.load_in_4bit
    assert four.bnb_4bit_quant_type == "nf4"
    assert four.bnb_4bit_use_double_quant
    assert str(four.bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    assert get_quantization_config(ModelConfig(load_in_4bit=True, dtype="auto")).load_in_4bit


def test_each_process_has_its_own_device() -> None:
    import torch

    assert get_kbit_device_map() == ({"": 0} if torch.cuda.is_available() else None)


def files(folder: Path, *sizes: int) -> list[str]:
    paths = [folder / f"{number}.jsonl" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_text(
            "".join(json.dumps({"text": f"{number} {row}", "other": row}) + "\n" for row in range(size))
        )
    return [str(path) for path in paths]


def mixture(folder: Path, fractions: Any = (None, None), **options: Any) -> DatasetMixtureConfig:
    parts = [
        DatasetConfig("json", data_files=file, columns=["text"], fraction=share)
        for file, share in zip(files(folder, 8, 4), fractions, strict=True)
    ]
    return DatasetMixtureConfig(parts, **options)


def test_datasets_are_joined_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert get_dataset(mixture(tmp_path))["train"].num_rows == 12
    split = get_dataset(mixture(tmp_path, test_split_size=3))
    assert {name: part.num_rows for name, part in split.items()} == {"train": 9, "test": 3}
    again = get_dataset(mixture(tmp_path, test_split_size=3))
    assert again["test"]["text"] == split["test"]["text"], "processes and restarts have one split"
    shares = get_dataset(mixture(tmp_path, (1.0, 3.0)))["train"]["text"]
    assert [sum(text.startswith(kind) for text in shares) for kind in "01"] == [1, 4]
    assert shares[0] == "0 0"
    assert shares[-1] == "1 3"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DatasetMixtureConfig(), "name at least one dataset"),
        (DatasetMixtureConfig([DatasetConfig("a", fraction=1.0), DatasetConfig("b")]), "or for none"),
        (DatasetMixtureConfig([DatasetConfig("a", fraction=1.0)], streaming=True), "a stream has no length"),
        (DatasetMixtureConfig([DatasetConfig("a")], streaming=True, test_split_size=2), "cannot be split"),
    ],
)
def test_mixtures_that_cannot_be(config: DatasetMixtureConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_dataset(config)


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    config = DatasetMixtureConfig([DatasetConfig("json", data_files=str(tmp_path / "none.jsonl"))])
    with pytest.raises(DataError, match="cannot be loaded"):
        get_dataset(config)
