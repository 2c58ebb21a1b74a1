"""Loops of the user's own under DeepSpeed's engine, with a plugin's fields and with a configuration's placeholders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.zero import loop_ranks, offload_ranks
from tests.zero.needed import needs_deepspeed
from tests.zero.test_swap_files import NO_COMPILER, compiles

from windlass import Accelerator
from windlass.core.errors import ConfigError
from windlass.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(0, loop_ranks.loop, "-1", tmp_path_factory.mktemp("alone"))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["1", "2", "3", "file"])
def test_a_loop_equals_one_process(kind: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Accumulation with a shorter last update, clipping, a schedule; a loaded state continues to the same bits."""
    found, _ = on_ranks(2, loop_ranks.loop, kind, tmp_path)
    assert found["type"] == "DEEPSPEED"
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["norms"] == pytest.approx([] if kind == "file" else alone["norms"], abs=TOLERANCE)
    assert found["weights"].keys() == alone["weights"].keys()
    for name, values in found["weights"].items():
        assert values == pytest.approx(alone["weights"][name], abs=TOLERANCE), name


def test_a_second_backward_through_a_graph_that_stage_3_has_freed_is_explained() -> None:
    for said in on_ranks(2, loop_ranks.backward_again, 3):
        assert "frees the parameters of a forward in its first backward" in said


def test_a_schedule_beside_that_of_the_configuration_is_refused() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=loop_ranks.FILE))
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=r"scheduler.type='WarmupLR': contradicts ConstantLR of the script"):
        accelerator.prepare(schedule)
    with pytest.raises(ConfigError, match=r"optimizer.type='AdamW': contradicts SGD of the script"):
        accelerator.prepare(optimizer)


def test_placeholders_may_be_prepared_one_after_the_other() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=loop_ranks.FILE))
    optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2)
    with pytest.raises(
        ConfigError, match="DummyScheduler=None: represents the schedule of a DummyOptim that was not"
    ):
        accelerator.prepare(schedule)
    made = accelerator.prepare(optimizer)
    assert accelerator.prepare(made) is made
    assert accelerator.prepare(schedule).optimizer.param_groups is made.param_groups


# --- where the optimizer's state lies, and what clears gradients ------------------------------------------------------


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Loops and a Trainer in one process without DeepSpeed."""
    return on_ranks(0, offload_ranks.main, tmp_path_factory.mktemp("memory"), -1, "none")[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loops_equal_those_without_deepspeed_wherever_the_state_lies(
    stage: int, device: str, in_memory: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients are cleared after the step or before the backward, by the optimizer that `prepare` returned, by the
    script's own or by the model; before a step, they are dropped; and a step without gradients changes nothing.
    A step with a closure is refused: its backwards would be the engine's, and the step would find no gradients.
    """
    if device == "nvme" and stage < 3:
        with pytest.raises(ConfigError, match=r"offload_optimizer\.device='nvme'"):
            offload_ranks.looped(tmp_path, stage, device, "B")
        return
    if device == "nvme" and not compiles():
        pytest.skip(NO_COMPILER)
    found, _ = on_ranks(2, offload_ranks.main, tmp_path, stage, device)
    assert "steps without a closure: call accelerator.backward(loss)" in found.pop("closure")
    assert found.keys() == in_memory.keys()
    for name, losses in found.items():
        assert losses == pytest.approx(in_memory[name], abs=TOLERANCE), name
