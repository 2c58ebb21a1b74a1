"""What scripts read and extend of TrainingArguments, TrainerState, TrainerControl and AcceleratorConfig."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.versions import with_pinned
from transformers import trainer_callback as reference
from transformers import training_args as their_arguments
from transformers.trainer_pt_utils import AcceleratorConfig as TheirConfig

from windlass import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.core.errors import ConfigError
from windlass.core.events import ExportableState


@dataclass
class ScriptArguments(TrainingArguments):
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    model_init_kwargs: Any = None
    note: str = ""


@with_pinned("transformers")
def test_a_subclass_declares_fields_that_may_be_json() -> None:
    wanted = set(their_arguments.TrainingArguments._VALID_DICT_FIELDS)
    assert {*TrainingArguments._VALID_DICT_FIELDS} == wanted | {
        "alerts",
        "fp8_config",
        "liger_kernel_config",
        "optim_groups",
    }
    args = ScriptArguments("out", model_init_kwargs='{"depth": 3, "name": "x"}', note="{}")
    assert args.model_init_kwargs == {"depth": 3, "name": "x"}
    assert args.note == "{}"
    assert ScriptArguments("out", model_init_kwargs="a name").model_init_kwargs == "a name"


@pytest.mark.parametrize("steps", [(0.1, 20, None), (5, 0.33, 0.5), (1, 2, 3)])
def test_steps_are_computed_alike(steps: tuple[Any, ...]) -> None:
    args = SimpleNamespace(logging_steps=steps[0], eval_steps=steps[1], save_steps=steps[2])
    ours, theirs = TrainerState(), reference.TrainerState()
    for state in (ours, theirs):
        state.compute_steps(args, 97)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_references_of_a_run() -> None:
    trainer = SimpleNamespace(
        hp_name=None, _trial=None, is_local_process_zero=lambda: True, is_world_process_zero=lambda: False
    )
    ours, theirs = TrainerState(), reference.TrainerState()
    for state in (ours, theirs):
        state.init_training_references(trainer, 12, 3, None)
    assert (ours.max_steps, ours.num_train_epochs, ours.trial_params) == (12, 3, theirs.trial_params)
    assert (ours.is_local_process_zero, ours.is_world_process_zero) == (True, theirs.is_world_process_zero)
    ours.init_training_references(trainer, 12, 3, SimpleNamespace(params={"learning_rate": 0.1}))
    assert ours.trial_params == {"learning_rate": 0.1}


def test_callbacks_with_state_are_given_as_a_list() -> None:
    def states(module: Any, state: Any, stopping: Any) -> Any:
        control = module.TrainerControl(should_save=True)
        return state(log_history=None, stateful_callbacks=[stopping(2, 0.5), control, stopping(3)])

    ours = states(SimpleNamespace(TrainerControl=TrainerControl), TrainerState, EarlyStoppingCallback)
    theirs = states(reference, reference.TrainerState, reference.EarlyStoppingCallback)
    assert ours.stateful_callbacks == theirs.stateful_callbacks
    assert ours.log_history == theirs.log_history == []
    with pytest.raises(TypeError, match="not an ExportableState"):
        TrainerState(stateful_callbacks=[TrainerCallback()])


def test_a_state_makes_an_equal_object() -> None:
    stopping = EarlyStoppingCallback(4, 0.25)
    stopping.early_stopping_patience_counter = 2
    again = EarlyStoppingCallback.from_state(stopping.state())
    assert again.state() == stopping.state()
    assert TrainerControl.from_state(TrainerControl(should_log=True).state()) == TrainerControl(
        should_log=True
    )
    with pytest.raises(NotImplementedError, match="must define state"):
        ExportableState().state()


def test_an_accelerator_config_is_read_and_taken_apart_alike(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"split_batches": True, "non_blocking": True}))
    ours, theirs = AcceleratorConfig.from_json_file(file), TheirConfig.from_json_file(str(file))
    assert ours.to_dict() == theirs.to_dict()
    assert ours.pop("non_blocking") is theirs.pop("non_blocking") is True
    assert ours.pop("nothing", 3) == 3
    file.write_text(json.dumps({"splitbatches": True}))
    with pytest.raises(ConfigError, match="split_batches"):
        AcceleratorConfig.from_json_file(file)


def test_arguments_that_transformers_pickled_are_arguments(tmp_path: Path) -> None:
    """`windlass run` answers with this class for the name in `training_args.bin`."""
    theirs = their_arguments.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", learning_rate=3e-4
    )
    ours = TrainingArguments.__new__(TrainingArguments)
    ours.__setstate__(vars(theirs))
    assert (ours.learning_rate, ours.use_cpu, ours.is_given("learning_rate")) == (3e-4, True, True)
    assert ours.nonfinite_policy == TrainingArguments(str(tmp_path)).nonfinite_policy
    assert pickle.loads(pickle.dumps(ours)) == ours
