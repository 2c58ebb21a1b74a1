"""The singletons that scripts ask who they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.process_state import LoopState, publish
from windlass.compat.state import AcceleratorState, GradientState, PartialState
from windlass.config.plugins import GradientAccumulationPlugin
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.gang import Gang

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The singletons know nothing before each test, and nothing after it."""
    for _ in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if _ == 0:
            yield


@pytest.mark.dist
def test_three_processes_beside_accelerate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    said = launch(3, Path(__file__).with_name("state_ranks.py"), tmp_path / "meeting")
    assert said.count("state is right") == 3


def test_one_process_is_the_normal_case() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.backend) == (1, 0, None)
    assert (state.device, str(state.distributed_type), state.use_distributed) == (CPU, "NO", False)
    assert PartialState().device is state.device
    with state.split_between_processes([1, 2, 3], apply_padding=True) as part:
        assert part == [1, 2, 3]
    assert "Num processes: 1" in repr(state)


def test_the_launcher_may_ask_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: pytest.fail("asked for an accelerator"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert PartialState().device == CPU


def test_an_accelerator_is_needed_for_its_state() -> None:
    with pytest.raises(ModelError, match="create one first"):
        AcceleratorState()
    assert GradientState().sync_gradients
    assert not GradientState().in_dataloader


def test_what_an_accelerator_was_made_with_cannot_change() -> None:
    publish(LoopState(Gang(), CPU, mixed_precision="bf16"), accumulation=None)
    assert AcceleratorState("bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="mixed_precision='fp16'"):
        AcceleratorState("fp16")
    assert PartialState().device == CPU
    assert AcceleratorState().deepspeed_plugin is None


def test_the_loop_is_seen_moving() -> None:
    accumulation = AccumulationState(GradientAccumulationPlugin(num_steps=2))
    publish(LoopState(Gang(), CPU), accumulation)
    state = GradientState()
    assert (state.num_steps, state.adjust_scheduler, state.remainder) == (2, True, -1)
    accumulation.advance()
    assert not state.sync_gradients
    accumulation.advance()
    assert GradientState().sync_gradients
    assert "Sync Gradients: True" in repr(state)


def test_an_accelerator_publishes_its_state_and_keeps_its_own() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    assert (first.state.mixed_precision, AcceleratorState().mixed_precision) == ("bf16", "bf16")
    assert vars(first.state) == vars(AcceleratorState())
    Accelerator(cpu=True)
    assert (first.state.mixed_precision, AcceleratorState().mixed_precision) == ("bf16", "no")


def test_the_state_of_an_accelerator_can_be_reset() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state._reset_state()
    with pytest.raises(ModelError, match="create one first"):
        AcceleratorState()
    assert PartialState().initialized
    accelerator.state._reset_state(True)
    assert not PartialState._shared_state


def test_a_script_may_switch_the_checks_of_collectives_on() -> None:
    PartialState(cpu=True).debug = True
    accelerator = Accelerator(cpu=True)
    assert PartialState().debug
    assert accelerator.state.debug
    assert AcceleratorState().debug
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState(cpu=True).debug
