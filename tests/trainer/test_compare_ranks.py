"""Ranks that were given different settings, models or data are named before the first update."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.dist.launch import on_ranks
from tests.trainer import alike_ranks

from windlass import TrainingArguments
from windlass.config.arguments import shared_arguments
from windlass.config.sections.setting import rules_of
from windlass.dist.alike import differences

EXPECTED = {
    "learning_rate": "0.001 on rank 0, 0.002 on rank 1",
    "max_grad_norm": "1.0 on rank 0, 0.5 on rank 1",
    "optim": "'adamw_torch' on rank 0, 'sgd' on rank 1",
    "save_steps": "10 on rank 0, 20 on rank 1",
    "seed": "1 on rank 0, 2 on rank 1",
    "train_dataset": "'8 samples' on rank 0, '6 samples' on rank 1",
    "resume_from_checkpoint": "None on rank 0, True on rank 1",
    "call": "\"evaluate() of 'eval'\" on rank 0, 'train()' on rank 1",
    "compute_metrics": "'none' on rank 0, 'given' on rank 1",
    "model.layer.bias": "'float32[2]' on rank 0, 'float32[2] frozen' on rank 1",
    "optimizer.group 0.lr": "0.1 on rank 0, 0.2 on rank 1",
    "callbacks": "['DefaultFlowCallback'] on rank 0, ['DefaultFlowCallback', 'EarlyStoppingCallback'] on rank 1",
    "plan.precision.compute": "'fp32' on rank 0, 'bf16' on rank 1",
    "gradient_accumulation_steps": "1 on rank 0, 2 on rank 1",
    "mixed_precision": "'no' on rank 0, 'bf16' on rank 1",
    "split_batches": "False on rank 0, True on rank 1",
    "prepare() argument 0, model.weight": "'float32[2, 3]' on rank 0, 'float32[4, 3]' on rank 1",
    "prepare() argument 1, optimizer.group 0.lr": "0.1 on rank 0, 0.2 on rank 1",
    "prepare() argument 2, loader.samples": "8 on rank 0, 6 on rank 1",
}


@pytest.mark.dist
def test_what_differs_between_ranks_is_named_on_all_of_them(folder: Path) -> None:
    found = on_ranks(2, alike_ranks.main, folder)
    assert found[0] == found[1]
    for name, values in EXPECTED.items():
        assert f"{name}: {values}" in found[0][name], (name, found[0][name])
    assert found[0]["steps"] == 3, "what may differ between ranks must not be refused"


def test_ranks_with_the_same_value_are_named_together() -> None:
    assert differences([{"a": "1", "b": "2"}, {"a": "3", "b": "2"}, {"a": "1", "b": "2"}, {"b": "2"}]) == [
        "a: 1 on ranks 0, 2, 3 on rank 1, (missing) on rank 3"
    ]


def test_secrets_are_not_shown() -> None:
    (line,) = differences([{"x.hub_token": "abc"}, {"x.hub_token": "def"}])
    assert line == "x.hub_token: (a secret value) on rank 0, (a secret value) on rank 1"


def test_arguments_that_may_differ_have_a_reason_and_are_not_compared() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    may_differ = {name for name, rules in rules_of(TrainingArguments).items() if rules.per_rank}
    assert {"output_dir", "hub_token", "dataloader_num_workers"} <= may_differ
    assert shared_arguments(TrainingArguments("out")).keys() == names - may_differ
