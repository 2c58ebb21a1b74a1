"""The rank of this process in its job, as its launcher set it.

Read from the environment once per call and never written. It is on the ground floor because configuration
(`args.world_size`) and process groups (`dist`) both need it, and neither may import the other.
"""

from __future__ import annotations

import os
import re
from dataclasses import astuple, dataclass, replace

from windlass.core.errors import ConfigError, Problem

# Set by `windlass launch` for its processes: its command line up to the script, as JSON, for the command that resumes.
LAUNCH_VARIABLE = "WINDLASS_LAUNCH_COMMAND"
# In the order of the fields of `World`, with what counts if a launcher sets the first two alone.
_VARIABLES = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# The number of processes of a machine, as torchrun, DeepSpeed's launcher, and mpirun of three MPIs set it.
_SIZES_HERE = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_PORTS = 65536


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the job. A single process is a world of size 1, the normal case."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """First process of the whole job."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """First process of this machine."""
        return self.local_rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def machines(self) -> int:
        """The number of machines, if each has as many processes as this one."""
        return max(self.size // self.local_size, 1)

    @property
    def machine(self) -> int:
        """The rank of the first process of this machine, by which the machine is known."""
        return self.rank - self.local_rank

    def variables(self) -> dict[str, str]:
        """The variables with which a launcher makes this the world of a process."""
        return dict(zip(_VARIABLES, map(str, astuple(self)), strict=True))


def world_from_environment() -> World:
    """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` as torchrun and its kin set them."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return World()
    values = []
    size_here = next((name for name in _SIZES_HERE if name in env), _SIZES_HERE[0])
    for variable, default in _VARIABLES.items():
        name = size_here if variable == _SIZES_HERE[0] else variable
        text = env.get(name, default)
        try:
            values.append(int(text))
        except ValueError:
            fix = "must be a whole number; start the script with torchrun, which sets it"
            raise ConfigError(Problem(name, text, fix)) from None
    world = World(*values)
    if "LOCAL_RANK" in env and size_here not in env:
        world = _sized_by_slurm(world) or _sized_by_address(world)
    size = f"WORLD_SIZE={world.size}"
    here = f"{size_here}={world.local_size}, the processes of this machine"
    if size_here not in env:
        here += " (1 if it is not set: set it, as torchrun does)"
    for name, value, first, last, total in (
        ("RANK", world.rank, 0, world.size - 1, size),
        (size_here, world.local_size, 1, world.size, size),
        ("LOCAL_RANK", world.local_rank, 0, world.local_size - 1, here),
    ):
        if not first <= value <= last:
            raise ConfigError(Problem(name, value, f"must lie in {first}..{last} for {total}"))
    return world


def _sized_by_slurm(world: World) -> World | None:
    """`world` with the number of tasks that Slurm has started on this machine; None if the job is not of its tasks.

    Every process of a job decides alike whether Slurm counts: by how many tasks there are, not by its own place.

    Raises:
        ConfigError: Slurm has this process in another place than its rank and local rank.
    """
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in os.environ), "")
    text, node = os.environ.get(name, ""), os.environ.get("SLURM_NODEID", "")
    # "2(x3),1": two tasks on each of three machines, and one on the next.
    counts = [
        int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))
    ]
    if sum(counts) != world.size or not node.isdecimal() or int(node) >= len(counts):
        return None
    first, here = sum(counts[: int(node)]), counts[int(node)]
    if world.machine != first or world.local_rank >= here:
        fix = (
            f"does not fit RANK={world.rank} on a machine with ranks {first}..{first + here - 1}, which Slurm says by "
            f"{name}={text} and SLURM_NODEID={node}: set it to $SLURM_LOCALID under srun --distribution=block, or set "
            "LOCAL_WORLD_SIZE too, as torchrun does"
        )
        raise ConfigError(Problem("LOCAL_RANK", world.local_rank, fix))
    return replace(world, local_size=here)


def _sized_by_address(world: World) -> World:
    """`world` on one machine, if its processes meet where only those of one machine can.

    Raises:
        ConfigError: they do, and the local rank is not the rank.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if address not in _LOOPBACK:
        return world
    if world.local_rank != world.rank:
        fix = f"must be the same as RANK={world.rank}, because at MASTER_ADDR={address} only processes of one machine "
        fix += "meet; or set LOCAL_WORLD_SIZE too (1 where each has a LOCAL_RANK of 0)"
        raise ConfigError(Problem("LOCAL_RANK", world.local_rank, fix))
    return replace(world, local_size=world.size)


def check_alone() -> None:
    """Raise ConfigError if this process was to be one of several, and its launcher did not say which."""
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        fix = "RANK is not set: start the script with torchrun, which sets both, or unset WORLD_SIZE to train alone"
        raise ConfigError(Problem("WORLD_SIZE", os.environ["WORLD_SIZE"], fix))


def meeting_place() -> tuple[str, int]:
    """The address and port at which the processes of the job meet. Raises ConfigError if the launcher named none."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address:
        fix = "is needed for WORLD_SIZE > 1: the address of the machine of rank 0; torchrun sets it"
        raise ConfigError(Problem("MASTER_ADDR", address, fix))
    if not (port.isdecimal() and int(port) < _PORTS):
        fix = f"must be a port on MASTER_ADDR that is free, below {_PORTS}; torchrun sets it"
        raise ConfigError(Problem("MASTER_PORT", port, fix))
    return address, int(port)
