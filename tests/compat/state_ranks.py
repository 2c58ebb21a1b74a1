"""Three processes: who they are, what runs where, and how inputs are shared out, beside accelerate's own state."""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from accelerate import PartialState as Peer
from tests.dist.same import assert_same

from windlass.accelerator.process_state import LoopState, publish
from windlass.compat.state import AcceleratorState, GradientState, PartialState
from windlass.core.errors import ConfigError, DataError
from windlass.dist import operations
from windlass.dist.gang import current, leave


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
    with pytest.raises(DataError, match="range cannot be split"):
        part_of(state, range(5))


def order(state: PartialState) -> None:
    """The first process is through before any other begins: what it says is there when they ask."""
    store = torch.distributed.distributed_c10d._get_default_store()
    with state.main_process_first():
        seen = int(store.add("through", 1))
    assert (seen == 1) == state.is_main_process


def singletons(state: PartialState) -> None:
    assert PartialState()._gang is current()
    assert PartialState().debug
    loop = LoopState(current(), state.device, debug=True, sharded=True, mixed_precision="bf16")
    publish(loop, accumulation=None)
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


def main() -> None:
    with pytest.raises(ConfigError, match="port"):
        PartialState(port=1)
    state = PartialState(timeout=timedelta(seconds=60), init_method=f"file://{sys.argv[1]}", backend="gloo")
    peer = Peer(cpu=True)
    who(state, peer)
    shares(state, peer)
    order(state)
    state.wait_for_everyone()
    singletons(state)
    leave()
    print("state is right")


if __name__ == "__main__":
    main()
