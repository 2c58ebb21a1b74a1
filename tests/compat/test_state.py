"""The singletons that scripts ask who they are."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import PartialState as Peer
from tests.dist.launch import on_ranks
from tests.dist.same import assert_same

import windlass.state
from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.ranks import LoopState, publish
from windlass.accelerator.setup import Handlers, LoopSettings, Setup
from windlass.compat.state import AcceleratorState, GradientState, PartialState
from windlass.config.loop_options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from windlass.config.plan import DistPlan, PrecisionPlan, ShardPlan
from windlass.core.errors import ConfigError, DataError, ModelError
from windlass.dist import operations
from windlass.dist.gang import Gang, current, leave

CPU = torch.device("cpu")


def loop_state(all_ranks: Gang, compute: Any = "fp32", dist: DistPlan | None = None) -> LoopState:
    """The state of an accelerator."""
    plan, accumulation = dist or DistPlan(), GradientAccumulationPlugin()
    options = (accumulation, DataLoaderConfiguration(), ProjectConfiguration(), Handlers())
    return LoopState(
        Setup(LoopSettings(plan, PrecisionPlan(compute), *options), all_ranks, CPU, lambda: plan)
    )


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
    on_ranks(3, main, tmp_path / "meeting")


def test_one_process_is_the_normal_case() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.backend) == (1, 0, None)
    assert (state.device, str(state.distributed_type), state.use_distributed) == (CPU, "NO", False)
    assert PartialState().device is state.device
    with state.split_between_processes([1, 2, 3], apply_padding=True) as part:
        assert part == [1, 2, 3]


def test_the_settings_of_a_loop_are_shown_as_by_accelerate() -> None:
    shown = []
    for library in (windlass, accelerate):
        shown.append(repr(library.Accelerator(cpu=True, mixed_precision="bf16").state))
        library.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert shown[0] == shown[1]
    assert shown[0].endswith("\n\nMixed precision type: bf16\n")


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
    publish(loop_state(Gang(), "bf16"), accumulation=None)
    assert AcceleratorState("bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="mixed_precision='fp16'"):
        AcceleratorState("fp16")
    assert PartialState().device == CPU
    assert AcceleratorState().deepspeed_plugin is None


def test_the_loop_is_seen_moving() -> None:
    accumulation = AccumulationState(GradientAccumulationPlugin(num_steps=2))
    publish(loop_state(Gang()), accumulation)
    state = GradientState()
    assert (state.num_steps, state.adjust_scheduler, state.remainder) == (2, True, -1)
    accumulation.advance()
    assert not state.sync_gradients
    accumulation.advance()
    assert GradientState().sync_gradients
    assert "Sync Gradients: True" in repr(state)


def test_what_is_set_on_the_singleton_reaches_the_loop() -> None:
    accumulation = AccumulationState(GradientAccumulationPlugin(num_steps=2))
    publish(loop_state(Gang()), accumulation)
    GradientState().sync_gradients = False
    assert not accumulation.sync_gradients
    accumulation.sync_gradients = True
    assert GradientState().sync_gradients


def test_nothing_can_be_set_without_a_loop() -> None:
    with pytest.raises(ModelError, match="create an Accelerator"):
        GradientState().sync_gradients = False
    assert not GradientState().initialized


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


# --- what each rank runs ----------------------------------------------------------------------------------------------


class Rows:
    """Stands for a dataset: a length and `select`."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: list[int]) -> list[int]:
        return [self.rows[place] for place in places]


def who(state: PartialState, peer: Any) -> None:
    for name in (
        "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
        "is_last_process", "use_distributed", "backend",
    ):  # fmt: skip
        assert getattr(state, name) == getattr(peer, name), name
    assert state.device.type == peer.device.type == "cpu"
    assert repr(state) == repr(peer).replace("cpu:0", "cpu")
    assert str(state.distributed_type) == peer.distributed_type.value == "MULTI_CPU"
    for name in ("on_main_process", "on_last_process", "on_local_main_process"):
        assert getattr(state, name)(lambda: 1)() == getattr(peer, name)(lambda: 1)()
    ran = state.on_process(lambda: "here", process_index=1)()
    assert ran == ("here" if state.process_index == 1 else None)


def part_of(state: Any, inputs: Any, **options: Any) -> Any:
    with state.split_between_processes(inputs, **options) as part:
        return part


def shares(state: PartialState, peer: Any) -> None:
    inputs = (
        list("abcdefg"),
        tuple(range(4)),
        torch.arange(8).reshape(4, 2),
        {"x": [1, 2, 3, 4], "y": torch.arange(4)},
        defaultdict(list, {"x": [1, 2, 3, 4]}),
    )
    for given in inputs:
        assert_same(part_of(state, given), part_of(peer, copy.copy(given)))
    assert part_of(state, ["a"], apply_padding=True) == part_of(peer, ["a"], apply_padding=True) == ["a"]
    padded = part_of(state, torch.arange(4), apply_padding=True)
    assert operations.gather(padded).tolist() == [0, 1, 2, 3, 3, 3]
    rows = part_of(state, Rows([5, 6, 7, 8]), apply_padding=True)
    assert rows == [[5, 6], [7, 8], [8, 8]][state.process_index]
    kept = {"x": [1, 2, 3]}
    part_of(state, kept)
    assert kept == {"x": [1, 2, 3]}, "what was given is left as it was"
    with pytest.raises(DataError, match="one length"):
        part_of(state, {"x": [1], "y": [1, 2]})
    for other in (range(5), iter([1]), {"x": 5}):
        with pytest.raises(DataError, match=r"a (range|list_iterator|int) cannot be split"):
            part_of(state, other)


def order(state: PartialState) -> None:
    """The first process is through before any other begins: what it says is there when they ask."""
    store = torch.distributed.distributed_c10d._get_default_store()
    with state.main_process_first():
        seen = int(store.add("through", 1))
    assert (seen == 1) == state.is_main_process


def singletons(state: PartialState) -> None:
    assert PartialState()._all_ranks is current()
    assert PartialState().debug
    sharded = DistPlan(strategy="fsdp", shard=ShardPlan())
    publish(loop_state(current(), "bf16", sharded), accumulation=None)
    shown = AcceleratorState()
    assert (shown.mixed_precision, str(shown.distributed_type), shown.is_fsdp2) == ("bf16", "FSDP", True)
    assert shown.process_index == state.process_index
    assert PartialState().debug
    with pytest.raises(operations.DistributedOperationException):
        operations.reduce(torch.ones(1 + state.process_index))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with pytest.raises(AttributeError, match="state was reset"):
        _ = state.device


def main(meeting: Path) -> None:
    with pytest.raises(ConfigError, match="port"):
        PartialState(port=1)
    state = PartialState(timeout=timedelta(seconds=60), init_method=f"file://{meeting}", backend="gloo")
    peer = Peer(cpu=True)
    who(state, peer)
    shares(state, peer)
    order(state)
    state.wait_for_everyone()
    singletons(state)
    leave()
