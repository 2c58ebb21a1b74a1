from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoint.test_nodes import machines, on_ranks
from torch import Tensor

from windlass.checkpoint import host_memory
from windlass.checkpoint.codec import Encoded
from windlass.checkpoint.content import Content
from windlass.checkpoint.host_memory import HostMemory, devices_of
from windlass.checkpoint.sharded import RankParts
from windlass.checkpoint.weights import split_aliases
from windlass.core.errors import CheckpointError
from windlass.dist.gang import Gang

CPU = torch.device("cpu")
FILE = "model.safetensors"


def content(value: float, size: int = 5) -> Content:
    tensor = torch.full((size,), value)
    return Content(
        shared={"optimizer": {"state": {"w": {"exp_avg": tensor, "step": 3}}, "betas": (0.9, 0.99)}},
        per_rank={"rng": {"state": tensor.clone()}},
        weights={FILE: {"embed": tensor, "head": tensor, "norm": tensor.clone()}},
        parts=[RankParts("model", 0, {"rows": tensor.clone()}, None)],
        files={"config.json": b"{}"},
    )


def tensors(found: Content) -> dict[str, Tensor]:
    assert isinstance(found.shared["optimizer"], Encoded)
    assert isinstance(found.per_rank, Encoded)
    return {
        **found.shared["optimizer"].tensors,
        **found.per_rank.tensors,
        **found.weights[FILE],
        **{f"part {name}": tensor for name, tensor in found.parts[0].tensors.items()},
    }


def test_a_snapshot_does_not_change_with_what_it_was_taken_of() -> None:
    live = content(1.0)
    taken, arrived = HostMemory(CPU).snapshot(live)
    arrived()
    for tensor in tensors(HostMemory(CPU).snapshot(live)[0]).values():
        tensor.zero_()  # copies of another memory are others
    live.weights[FILE]["embed"].fill_(7)
    live.parts[0].tensors["rows"].fill_(7)
    live.per_rank["rng"]["state"].fill_(7)
    live.shared["optimizer"]["state"]["w"]["step"] = 8
    assert all(bool((tensor == 1).all()) for tensor in tensors(taken).values())
    assert taken.shared["optimizer"].tree["state"]["w"]["step"] == 3
    assert taken.files == {"config.json": b"{}"}


def test_the_second_snapshot_lies_where_the_first_lay() -> None:
    memory = HostMemory(CPU)
    first = {name: tensor.data_ptr() for name, tensor in tensors(memory.snapshot(content(1.0))[0]).items()}
    held = memory.nbytes
    taken, _ = memory.snapshot(content(2.0))
    assert {name: tensor.data_ptr() for name, tensor in tensors(taken).items()} == first
    assert all(bool((tensor == 2).all()) for tensor in tensors(taken).values())
    assert memory.nbytes == held


def test_tied_weights_are_copied_once_and_stay_tied() -> None:
    taken, _ = HostMemory(CPU).snapshot(content(1.0))
    assert list(taken.weights[FILE]) == ["embed", "head", "norm"]
    stored, aliases = split_aliases(taken.weights[FILE])
    assert list(stored) == ["embed", "norm"]
    assert aliases == {"head": "embed"}


def test_what_is_no_longer_there_or_has_another_shape_holds_no_memory() -> None:
    memory = HostMemory(CPU)
    memory.snapshot(content(1.0, size=1000))
    memory.snapshot(content(1.0, size=10))
    assert memory.nbytes == 5 * 10 * 4, "two states, two weights and a part"
    memory.snapshot(Content())
    assert memory.nbytes == 0


def test_any_strides_and_dtypes_are_copied_as_they_are() -> None:
    matrix = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).T
    flags = torch.tensor([True, False])
    taken, _ = HostMemory(CPU).snapshot(Content(weights={FILE: {"m": matrix, "f": flags}}))
    assert torch.equal(taken.weights[FILE]["m"], matrix)
    assert torch.equal(taken.weights[FILE]["f"], flags)
    assert taken.weights[FILE]["m"].is_contiguous()


def test_another_dtype_is_not_copied_into_the_memory_of_the_first() -> None:
    memory = HostMemory(CPU)
    for dtype in (torch.float32, torch.int64):
        taken, _ = memory.snapshot(Content(weights={FILE: {"w": torch.tensor([7], dtype=dtype)}}))
        assert taken.weights[FILE]["w"].dtype == dtype


def test_the_blocks_that_are_held_are_room_for_the_next_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    for name, text in (("max", "1000000"), ("current", "600000"), ("stat", "anon 7\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory.available_memory() == 500_000
    memory, large = HostMemory(CPU), content(1.0, size=15_000)
    assert memory.try_snapshot(large, Gang()) is not None
    (tmp_path / "memory.current").write_text("900000")
    assert memory.try_snapshot(large, Gang()) is not None
    assert HostMemory(CPU).try_snapshot(large, Gang()) is None


def test_ranks_of_a_machine_need_memory_together_and_copy_together() -> None:
    def needed(gang: Gang) -> int:
        return host_memory.room_on_machine(5, gang)[0]

    def copied(gang: Gang) -> bool:
        limit = 1_000_000 if gang.rank else 10
        return HostMemory(CPU, limit).try_snapshot(content(1.0), gang) is not None

    assert on_ranks(machines(1, 2), needed) == [10, 10]
    assert on_ranks(machines(2, 1), needed) == [5, 5]
    assert on_ranks(machines(1, 2), copied) == [False, False]


def test_what_cannot_be_saved_is_found_when_it_is_copied() -> None:
    with pytest.raises(CheckpointError, match="'hook'"):
        HostMemory(CPU).snapshot(Content(shared={"callback": {"hook": lambda: 0}}))


@pytest.mark.parametrize("place", ["shared", "per_rank", "weights", "parts"])
def test_copies_are_waited_for_wherever_they_come_from(place: str) -> None:
    """A rank that writes no weights may have nothing on a device but its own buffers."""
    away = {"buffer": torch.empty(3, device="meta")}
    content = Content(
        shared={"optimizer": Encoded({}, away if place == "shared" else {})},
        per_rank=Encoded({}, away if place == "per_rank" else {}),
        weights={FILE: {"w": torch.ones(2), **(away if place == "weights" else {})}},
        parts=[RankParts("model", 0, away if place == "parts" else {}, None)],
    )
    assert devices_of(content) == {torch.device("meta")}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_device_come_before_what_is_launched_after_them() -> None:
    live = torch.full((1 << 24,), 1.0, device="cuda")
    memory = HostMemory(torch.device("cuda"))
    for _ in range(3):
        taken, arrived = memory.snapshot(Content(weights={FILE: {"w": live.fill_(1.0)}}))
        live.fill_(2.0)
        arrived()
        assert taken.weights[FILE]["w"].is_pinned()
        assert bool((taken.weights[FILE]["w"] == 1).all())
