from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.core.errors import ModelError
from windlass.proofs import record
from windlass.proofs.record import (
    Claim,
    arguments_that_matter,
    check_adapter,
    describe,
    find_record,
    write_record,
)
from windlass.proofs.small_config import AxisLayout

transformers = pytest.importorskip("transformers")
LAYOUT = AxisLayout.parse("tp=2,cp=2")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))


def claim(layout: AxisLayout = LAYOUT, **options: Any) -> Claim:
    return Claim.of(transformers.LlamaConfig(**options), layout, {})


def outcome(of: Claim, **changes: Any) -> dict[str, Any]:
    made = {"schema": record.SCHEMA, "key": of.key(), "date": "2026-11-25", "proven": True, "difference": ""}
    return {**made, **changes}


def test_a_layout_is_proven_once_its_proof_is_recorded() -> None:
    assert describe(claim(), LAYOUT, "windlass prove X") == (
        False,
        "layout tp=2 cp=2: not proven equal to one process; prove it with: windlass prove X",
    )
    write_record(claim(), outcome(claim()))
    assert describe(claim(), LAYOUT, "") == (True, "layout tp=2 cp=2: proven on 2026-11-25")


def test_a_difference_that_was_found_is_reported() -> None:
    write_record(claim(), outcome(claim(), proven=False, difference="loss in update 1"))
    proven, line = describe(claim(), LAYOUT, "")
    assert not proven
    assert line.endswith("as found on 2026-11-25: loss in update 1")


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_what_was_not_compared_is_not_said_to_differ(status: str) -> None:
    write_record(claim(), outcome(claim(), proven=False, status=status, difference="rank 1 was killed"))
    assert describe(claim(), LAYOUT, "") == (
        False,
        "layout tp=2 cp=2: not proven equal to one process, as tried on 2026-11-25: rank 1 was killed",
    )


def test_the_key_is_that_of_kinds_layout_arguments_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    one = claim()
    # Other sizes, initial values, dtypes and caches are the same kind of model.
    assert (
        claim(hidden_size=8192, num_hidden_layers=80, vocab_size=128256, use_cache=False).key() == one.key()
    )
    others = [
        claim(attention_bias=True), claim(num_key_value_heads=8), claim(tie_word_embeddings=True),
        claim(AxisLayout.parse("tp=2")), dataclasses.replace(one, facts={"recompute": True}),
    ]  # fmt: skip
    keys = [one.key(), *(other.key() for other in others)]
    assert len(set(keys)) == len(keys)
    monkeypatch.setattr(record, "__version__", "9")
    assert one.key() not in keys


def test_a_damaged_or_foreign_record_proves_nothing() -> None:
    path = write_record(claim(), outcome(claim()))
    path.write_text("{")
    assert find_record(claim()) is None
    write_record(claim(), outcome(claim(), key="another"))
    assert find_record(claim()) is None


def test_arguments_that_change_what_is_computed_are_in_the_claim() -> None:
    args = TrainingArguments(
        "out", label_smoothing_factor=0.1, gradient_checkpointing=True, max_grad_norm=0.0
    )
    assert arguments_that_matter(args) == {"smoothing": True, "recompute": True}
    assert arguments_that_matter(TrainingArguments("out"), adapter=True) == {"clips": True, "adapter": True}
    of_shards = arguments_that_matter(TrainingArguments("out"), recompute=True)
    assert of_shards == {"clips": True, "recompute": True}
    several = arguments_that_matter(TrainingArguments("out"), pipeline=("Interleaved1F1B", 2))
    assert several == {"clips": True, "pipeline": ["Interleaved1F1B", 2]}
    # Each of the two ranks has two stages, and each stage a layer.
    layout = AxisLayout.parse("pp=2")
    assert Claim.of(transformers.LlamaConfig(), layout, several).config["num_hidden_layers"] == 4


def test_of_adapters_only_plain_lora_is_proven() -> None:
    peft = pytest.importorskip("peft")
    check_adapter(peft.LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="this one is a LoraConfig with modules_to_save, use_dora"):
        check_adapter(peft.LoraConfig(use_dora=True, modules_to_save=["lm_head"]))
    with pytest.raises(ModelError, match="this one is a PrefixTuningConfig"):
        check_adapter(peft.PrefixTuningConfig(num_virtual_tokens=2))
