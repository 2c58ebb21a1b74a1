"""How the processes of a job are laid out along named axes: copies, shards, and the ways to split one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config.parallel import rows_training as rows
from windlass.config.plugin_base import type_problems
from windlass.core.errors import ConfigError, Problem

# Axis of the mesh -> the field that holds its size.
AXES = {key.words[1]: key.words[0] for key in (rows.MESH_REPLICAS, rows.MESH_SHARDS, *rows.UNBUILT_AXES)}
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism: how keys and values travel, "allgather" or "alltoall"."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            fix = "must be allgather or alltoall"
            raise ConfigError(
                Problem("TorchContextParallelConfig.cp_comm_strategy", self.cp_comm_strategy, fix)
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by itself, as older scripts ask for it; `ParallelismConfig(tp_size=)` says the same."""

    tp_size: int = 1
    torch_device_mesh: Any = None

    def objections(self) -> Iterator[Problem]:
        """Any size above one, and a mesh made by the script."""
        if self.tp_size != 1:
            yield Problem("TorchTensorParallelPlugin.tp_size", self.tp_size, _not_built("tp"))
        if self.torch_device_mesh is not None:
            fix = "is not used: the mesh follows from the number of processes"
            yield Problem("TorchTensorParallelPlugin.torch_device_mesh", self.torch_device_mesh, fix)


@dataclass
class ParallelismConfig:
    """The size of each axis; their product is the number of processes. A size that is not said is 1.

    Attributes:
        dp_replicate_size: whole copies of the model.
        dp_shard_size: processes that share one copy, every one keeping a shard.
        tp_size, cp_size, sp_size: tensor, context and sequence parallelism.
        cp_backend, sp_backend: which code splits sequences.
        tp_handler, cp_handler, sp_handler: options of those three.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in AXES.values():
            if getattr(self, name) is None:
                setattr(self, name, 1)
        self.cp_backend = self.cp_backend or "torch"
        self.sp_backend = self.sp_backend or "deepspeed"
        if problems := list(self._contradictions()):
            raise ConfigError(problems)

    def size(self, axis: str) -> int:
        """Processes along `axis`, a key of `AXES`."""
        return int(getattr(self, AXES[axis]))

    def _names(self, axes: tuple[str, ...]) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes in use along which processes have batches of their own."""
        return self._names(DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes in use along which processes share a batch."""
        return self._names(("tp", "cp", "sp"))

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes in use along which weights are sharded."""
        return self._names(("dp_shard", "cp"))

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes in use along which losses are averaged."""
        return self._names((*DATA_AXES, "cp"))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of the mesh that sharded data parallelism is given."""
        return [*self._names(("dp_replicate",)), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes in use."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def data_parallel_size(self) -> int:
        """Processes with batches of their own."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share each of those batches."""
        return self.size("tp") * self.size("cp") * self.size("sp")

    @property
    def total_size(self) -> int:
        """The number of processes this layout is for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one copy of the model."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy is sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensor parallelism is asked for."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether context parallelism is asked for."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequence parallelism is asked for."""
        return self.size("sp") > 1

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Refused: the mesh is made when a model is spread over processes; `accelerator.torch_device_mesh` has it."""
        fix = "the mesh is made when a model is prepared; read accelerator.torch_device_mesh"
        raise ConfigError(Problem("ParallelismConfig.get_device_mesh", device_type, fix))

    build_device_mesh = get_device_mesh

    def _contradictions(self) -> Iterator[Problem]:
        """What makes no layout at all, whoever runs it."""
        where = type(self).__name__
        sizes = list(type_problems(self))
        yield from sizes
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != known:
                yield Problem(f"{where}.{name}", getattr(self, name), f"must be {known}")
        if sizes:
            return
        if self.cp_enabled and self.sp_enabled:
            fix = f"contradicts cp_size={self.cp_size}: one of the two splits the sequence"
            yield Problem(f"{where}.sp_size", self.sp_size, fix)
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            fix = "copies that are not sharded cannot be split further; set dp_shard_size above 1"
            yield Problem(f"{where}.dp_replicate_size", self.dp_replicate_size, fix)

    def objections(self, processes: int | None = None) -> Iterator[Problem]:
        """What Windlass cannot lay out, and a product that is not the number of processes."""
        for axis in self.non_dp_dim_names:
            yield Problem(f"{type(self).__name__}.{AXES[axis]}", self.size(axis), _not_built(axis))
        if processes is not None and self.total_size not in (1, processes):
            fix = f"the axes' product is {self.total_size}, and there are {processes} processes"
            yield Problem(f"{type(self).__name__}.dp_shard_size", self.dp_shard_size, fix)


def _not_built(axis: str) -> str:
    what = next(key.refused for key in rows.UNBUILT_AXES if axis in key.words)
    return f"{what} and use dp_replicate_size and dp_shard_size"
