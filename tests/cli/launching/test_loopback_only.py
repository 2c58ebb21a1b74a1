"""A job on one machine can be reached from that machine only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.cli.launching.listeners import listening, only_loopback
from tests.cli.launching.test_local import windlass
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.dist.listening import is_loopback, open_store
from windlass.launchers import debug_launcher

SCRIPT = Path(__file__)


def _found(folder: Path) -> list[set[str]]:
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert any(rank["rank"] for rank in ranks), "gloo listens somewhere"
    assert ranks[0]["launcher"], "the launcher holds the store of its processes"
    return [set(addresses) for rank in ranks for addresses in rank.values()]


@pytest.mark.dist
def test_a_launched_job_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    code, said = windlass("launch", "--cpu", "--num_processes", 2, SCRIPT, tmp_path)
    assert code == 0, said
    for addresses in _found(tmp_path):
        assert only_loopback(addresses), addresses


@pytest.mark.slow
@pytest.mark.dist
def test_so_does_a_function_started_from_a_program(tmp_path: Path) -> None:
    before = listening()
    debug_launcher(look, (str(tmp_path),))
    for addresses in _found(tmp_path):
        assert only_loopback(addresses - before), addresses


def test_a_store_listens_where_it_is_told() -> None:
    before = listening()
    store, where = open_store("127.0.0.1")
    assert where == "127.0.0.1"
    assert only_loopback(listening() - before)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_of_another_machine_is_not_taken_for_this_one() -> None:
    _, where = open_store("192.0.2.1")
    assert where == "", "it listens on all addresses, and says so"


@pytest.mark.parametrize(
    ("address", "local"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("node", False)],
)
def test_loopback_is_known_by_its_numbers(address: str, local: bool) -> None:
    assert is_loopback(address) is local


# --- what each rank runs ----------------------------------------------------------------------------------------------


def look(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from windlass.dist.gang import current

    rank = os.environ["RANK"]
    args = arguments(Path(folder) / "run", max_steps=1, use_cpu=True)
    Trainer(Net(), args, train_dataset=rows(16)).train()
    current()
    init_device_mesh("cpu", (dist.get_world_size(),))
    dist.new_group(backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = {"rank": sorted(listening()), "launcher": sorted(listening(os.getppid()))}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    look(sys.argv[1])
