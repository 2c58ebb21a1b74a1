"""The dataclasses of scripts have the fields and defaults of TRL's."""

from __future__ import annotations

import dataclasses

import pytest

import windlass


@pytest.mark.parametrize("name", ["ModelConfig", "ScriptArguments", "DatasetMixtureConfig"])
def test_fields_and_defaults_are_those_of_trl(name: str) -> None:
    trl = pytest.importorskip("trl")
    ours, theirs = getattr(windlass, name), getattr(trl, name)
    values = [{f.name: f.default for f in dataclasses.fields(cls)} for cls in (ours, theirs)]
    assert values[0].keys() == values[1].keys()
    assert [v for v in values[0].values() if v is not dataclasses.MISSING] == [
        v for v in values[1].values() if v is not dataclasses.MISSING
    ]


def test_a_model_has_one_width_and_one_target_is_a_word() -> None:
    with pytest.raises(ValueError, match="8 bit and 4 bit"):
        windlass.ModelConfig(load_in_8bit=True, load_in_4bit=True)
    assert windlass.ModelConfig(lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"


def test_datasets_may_be_mappings() -> None:
    mixture = windlass.DatasetMixtureConfig(datasets=[{"path": "json", "fraction": 0.5}])
    assert mixture.datasets == [windlass.DatasetConfig("json", fraction=0.5)]
