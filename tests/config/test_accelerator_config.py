"""`accelerator_config` in every form that scripts give it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from windlass.assemble.resolve import resolve_call, resolve_run
from windlass.assemble.rules import Facts
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError
from windlass.core.world import World


@dataclass
class Foreign:
    even_batches: bool = False
    non_blocking: bool = True


def test_every_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({"even_batches": False, "non_blocking": True}))
    wanted = AcceleratorConfig(even_batches=False, non_blocking=True)
    forms: list[Any] = [
        {"even_batches": False, "non_blocking": True}, '{"even_batches": false, "non_blocking": true}', str(path), path,
        Foreign(), wanted,
    ]  # fmt: skip
    for form in forms:
        assert TrainingArguments("out", accelerator_config=form).accelerator_config == wanted
    assert TrainingArguments("out").accelerator_config == AcceleratorConfig()


def test_fields_are_those_that_scripts_know() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.trainer_pt_utils.AcceleratorConfig().to_dict()
    assert AcceleratorConfig().to_dict() == theirs


def test_num_steps_stands_in_for_accumulation() -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    assert TrainingArguments("out", accelerator_config=config).gradient_accumulation_steps == 4
    same = TrainingArguments("out", accelerator_config=config, gradient_accumulation_steps=4)
    assert same.gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="contradicts gradient_accumulation_steps=2"):
        TrainingArguments("out", accelerator_config=config, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_accumulation_kwargs": {"num_step": 2}},
        {"gradient_accumulation_kwargs": {"num_steps": 0}},
        {"gradient_accumulation_kwargs": "x"},
        {"split_batches": "false"},
        {"dispatch_batches": 1},
        AcceleratorConfig(split_batches="no"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", accelerator_config=config)
    assert [p.field.startswith("accelerator_config.") for p in error.value.problems] == [True]


def test_unknown_keys_and_classes_are_answered() -> None:
    with pytest.raises(ConfigError, match="did you mean 'even_batches'"):
        TrainingArguments("out", accelerator_config={"even_batch": True})
    with pytest.raises(ConfigError, match="is a class"):
        TrainingArguments("out", accelerator_config=AcceleratorConfig)


def test_what_is_distributed_otherwise_is_in_the_plan() -> None:
    options = {"gradient_accumulation_kwargs": {"sync_each_batch": True}, "dispatch_batches": True}
    args = TrainingArguments("out", accelerator_config=options, max_steps=1)
    plan = resolve_run(args, resolve_call(args, World()), Facts(10))
    assert (plan.dist.reduce_each, plan.data.dispatch) == (True, True)


def test_the_state_of_the_processes_is_always_the_one_that_exists() -> None:
    config = TrainingArguments("out", accelerator_config={"use_configured_state": True}).accelerator_config
    assert config.use_configured_state
