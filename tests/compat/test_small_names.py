"""Names of a line or two: collators' parts, default callbacks, words for levels, questions about engines and loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.dist.same import assert_same
from transformers import trainer as their_trainer
from transformers import training_args as their_arguments
from transformers.data import data_collator as reference
from transformers.integrations import is_deepspeed_zero3_enabled as theirs_enabled

from windlass import Accelerator, DefaultFlowCallback, ProgressCallback
from windlass.compat import script_helpers
from windlass.compat.state import AcceleratorState, GradientState, is_initialized
from windlass.trainer import defaults
from windlass.zero import building

SAMPLES: list[Any] = [{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}]


def test_parts_of_collators() -> None:
    assert_same(
        script_helpers.torch_default_data_collator(SAMPLES), reference.torch_default_data_collator(SAMPLES)
    )
    assert_same(
        script_helpers.numpy_default_data_collator(SAMPLES), reference.numpy_default_data_collator(SAMPLES)
    )
    for thing in ([1, 2], np.ones(2), torch.ones(2, requires_grad=True)):
        assert_same(script_helpers.to_numpy(thing), reference.to_numpy(thing))

    class Own(script_helpers.DataCollatorMixin):
        return_tensors = "np"

        def numpy_call(self, features: Any) -> str:
            return "numpy"

    assert Own()(SAMPLES) == "numpy"


def test_default_callbacks() -> None:
    wanted = [cls.__name__ for cls in their_trainer.DEFAULT_CALLBACKS]
    assert [cls.__name__ for cls in defaults.DEFAULT_CALLBACKS] == wanted
    assert [DefaultFlowCallback] == defaults.DEFAULT_CALLBACKS
    assert defaults.DEFAULT_PROGRESS_CALLBACK is ProgressCallback


def test_words_for_levels() -> None:
    assert script_helpers.trainer_log_levels == their_arguments.trainer_log_levels
    assert script_helpers.log_levels == their_arguments.log_levels


def test_no_other_engine_holds_the_weights() -> None:
    assert building.is_deepspeed_zero3_enabled() is theirs_enabled() is False
    assert not script_helpers.is_fsdp_managed_module(torch.nn.Linear(1, 1))


def test_a_loop_is_known_once_there_is_an_accelerator() -> None:
    GradientState._reset_state()
    assert not is_initialized()
    Accelerator(cpu=True)
    assert is_initialized()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
