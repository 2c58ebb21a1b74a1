"""What the variables of a launcher say of this process, and what of them is refused."""

from __future__ import annotations

import socket

import pytest
import torch

from windlass.core.attempt import open_store_of_job
from windlass.core.errors import ConfigError
from windlass.core.world import World, check_alone, meeting_place, world_from_environment
from windlass.dist.gang import join

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _set(monkeypatch: pytest.MonkeyPatch, *values: str | None) -> None:
    for name, value in zip(_NAMES, values, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("values", "world"),
    [((None, None, None, None), World()), ((None, "1", "0", None), World()), (("1", None, None, None), World()),
     (("3", "6", "1", "2"), World(3, 6, 1, 2)), (("1", "2", None, None), World(1, 2, 0, 1))],
)  # fmt: skip
def test_what_a_launcher_says(
    values: tuple[str | None, ...], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, *values)
    assert world_from_environment() == world


@pytest.mark.parametrize(
    ("values", "said"),
    [(("0", "1", "0", "0"), "LOCAL_WORLD_SIZE=0: must lie in 1..1 for WORLD_SIZE=1"),
     (("0", "2", "0", "4"), "LOCAL_WORLD_SIZE=4: must lie in 1..2 for WORLD_SIZE=2"),
     (("1", "2", "1", None), "for LOCAL_WORLD_SIZE=1, the processes of this machine (1 if it is not set: set it"),
     (("0", "1", "-1", None), "LOCAL_RANK=-1: must lie in 0..0"),
     (("2", "2", "0", "1"), "RANK=2: must lie in 0..1 for WORLD_SIZE=2"),
     (("a", "2", "0", "1"), "RANK='a': must be a whole number")],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    values: tuple[str | None, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the third, a process would wait for the first of a machine of its own, which there is not."""
    _set(monkeypatch, *values)
    with pytest.raises(ConfigError) as refused:
        world_from_environment()
    assert said in str(refused.value)


def _set_by_slurm(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, node: int, tasks: str) -> None:
    """As `export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS` does for five tasks."""
    _set(monkeypatch, str(rank), "5", str(local), None)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", str(node))


@pytest.mark.parametrize(
    ("rank", "local", "node", "size"), [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 2), (3, 1, 1, 2), (4, 0, 2, 1)]
)
def test_slurm_says_how_many_processes_a_machine_has(
    rank: int, local: int, node: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_by_slurm(monkeypatch, rank, local, node, "2(x2),1")
    assert world_from_environment() == World(rank, 5, local, size)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x5)")  # of the step, where the other is of the job
    monkeypatch.setenv("SLURM_NODEID", str(rank))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert world_from_environment() == World(rank, 5, 0, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert world_from_environment() == World(rank, 5, 0, 3)


@pytest.mark.parametrize(("rank", "local", "node"), [(1, 0, 0), (1, 0, 1), (2, 2, 0)])
def test_a_place_that_slurm_does_not_say_is_refused(
    rank: int, local: int, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LOCAL_RANK that is always 0, and tasks that are dealt to the machines in turn."""
    _set_by_slurm(monkeypatch, rank, local, node, "2(x2),1")
    ranks = f"{2 * node}..{2 * node + 1}"
    with pytest.raises(
        ConfigError, match=rf"LOCAL_RANK={local}: .*RANK={rank} on a machine with ranks {ranks}"
    ):
        world_from_environment()


@pytest.mark.parametrize(("tasks", "node"), [("4", "0"), ("", "0"), ("5", "")])
def test_a_job_that_is_not_of_slurms_tasks_is_not_sized_by_them(
    tasks: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_by_slurm(monkeypatch, 1, 0, 0, tasks)
    monkeypatch.setenv("SLURM_NODEID", node)
    assert world_from_environment() == World(1, 5, 0, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=1: must lie in 0\.\.0 for LOCAL_WORLD_SIZE=1"):
        world_from_environment()


@pytest.mark.parametrize(
    "name", ["LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"]
)
def test_other_launchers_say_how_many_processes_a_machine_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, "3", "4", "1", None)
    monkeypatch.setenv(name, "2")
    assert world_from_environment() == World(3, 4, 1, 2)
    monkeypatch.setenv(name, "5")
    with pytest.raises(ConfigError, match=rf"{name}=5: must lie in 1\.\.4"):
        world_from_environment()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # of the launcher within the other
    assert world_from_environment() == World(3, 4, 1, 4)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_processes_that_meet_on_their_own_machine_are_all_there(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script sets variables that starts its processes itself."""
    _set(monkeypatch, "1", "2", "1", None)
    monkeypatch.setenv("MASTER_ADDR", address)
    assert world_from_environment() == World(1, 2, 1, 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="LOCAL_RANK=0: must be the same as RANK=1"):
        world_from_environment()
    monkeypatch.delenv("LOCAL_RANK")
    assert world_from_environment() == World(1, 2, 0, 1)


def test_a_machine_is_known_where_machines_have_unequal_numbers_of_processes() -> None:
    """Three on the first and one on the second: processes of one machine wait for its first."""
    places = [World(0, 4, 0, 3), World(1, 4, 1, 3), World(2, 4, 2, 3), World(3, 4, 0, 1)]
    assert [world.machine for world in places] == [0, 0, 0, 3]


@pytest.mark.parametrize("size", [None, "", "0", "1"])
def test_a_process_that_trains_alone(size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, None, size, None, None)
    check_alone()


def test_one_of_several_that_does_not_know_which_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would train alone."""
    _set(monkeypatch, None, "2", "0", None)
    with pytest.raises(ConfigError, match="WORLD_SIZE='2': RANK is not set"):
        join(world_from_environment(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [("", "29500", "MASTER_ADDR='': is needed"), ("node-1", "abc", "MASTER_PORT='abc': must be a port"),
     ("node-1", "", "MASTER_PORT='': must be a port"), ("node-1", "70000", "MASTER_PORT='70000': must be a port")],
)  # fmt: skip
def test_where_the_processes_meet_is_checked(
    address: str, port: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, "0", "2", "0", "2")
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError) as refused:
        open_store_of_job(0, 2)
    assert said in str(refused.value)


def test_a_port_that_another_program_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two jobs on one machine with the same MASTER_PORT."""
    _set(monkeypatch, "0", "2", "0", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}: is in use on this machine"):
            open_store_of_job(0, 2)


def test_where_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting_place() == ("node-1", 29500)
