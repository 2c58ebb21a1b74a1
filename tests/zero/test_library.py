from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.zero import loop_ranks, whole_ranks
from tests.zero.needed import needs_deepspeed
from torch import nn
from torch.optim.lr_scheduler import StepLR

from windlass import Accelerator
from windlass.config.deepspeed import INNER_KEYS
from windlass.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

pytestmark = [pytest.mark.dist, needs_deepspeed]


@pytest.mark.parametrize("before", ["", pytest.param("evaluated", marks=pytest.mark.slow)])
def test_forwards_before_the_first_update_leave_no_order_behind(before: str, tmp_path: Path) -> None:
    """The first batch is measured, and maybe evaluated, without backwards. Each update gathers its parameters once."""
    whole, _ = on_ranks(2, whole_ranks.main, tmp_path, before == "evaluated")
    assert whole == [False, *[True] * 5], "the first update records the order"


def test_options_of_a_schedule_are_known_before_it_is_made() -> None:
    unknown, needed = on_ranks(0, loop_ranks.refused_options)[0]
    assert "params.warmup_steps=3: WarmupLR has no such option; did you mean" in unknown
    assert "params.total_num_steps=None: must be set: WarmupCosineLR needs it" in needed


def test_a_placeholder_becomes_the_schedule_of_the_configuration_or_of_its_function() -> None:
    """What the configuration leaves open, the peak and the length of the warm-up, is that of the placeholders."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=loop_ranks.FILE))
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = DummyOptim(groups, lr=0.2)
    own = DummyScheduler(optimizer, lr_scheduler_callable=lambda made: StepLR(made, step_size=3))
    _, planned, made = accelerator.prepare(optimizer, DummyScheduler(optimizer, warmup_num_steps=4), own)
    assert (planned.scheduler.max_lrs, planned.scheduler.warmup_num_steps) == ([0.3, 0.3], 4)
    assert (type(made.scheduler), made.scheduler.step_size) == (StepLR, 3)


def test_keys_of_sections_are_those_of_the_library() -> None:
    precision = importlib.import_module("deepspeed.runtime.precision_config")
    offload = importlib.import_module("deepspeed.runtime.zero.offload_config")
    kinds = {
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
    }
    for path, kind in kinds.items():
        assert set(INNER_KEYS[path]) == set(kind.model_fields), path
