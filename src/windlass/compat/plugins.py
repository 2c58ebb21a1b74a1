# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Options of replication, of axes, of float8 and of compilation, as objects that scripts pass to `Accelerator`.

`config.parallel.from_plugins` translates them into settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from windlass.config.enums import Word
from windlass.config.loop_options import KwargsHandler, Options, Plugin
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import Settings
from windlass.config.parallel.sources import OWN_VARIABLE, from_environment
from windlass.config.parallel.table import KEYS, SECTIONS
from windlass.config.sections.setting import at_least, described, setting
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.mesh import Mesh, View


def launched(family: str) -> dict[str, Any]:
    """What the environment of this process sets of a family of settings, as its launcher exports it: {word: value}.

    Settings that are not built are included: the object that has them refuses them on use. Raises ConfigError if a
    variable cannot be read.
    """
    found: dict[str, Any] = {}
    for key in (key for key in KEYS.values() if key.family == family):
        for variable in key.variables:
            if (raw := os.environ.get(variable, "")) not in ("", "None"):
                found[key.words[0]] = key.read_for(variable, raw)
    own = from_environment(os.environ) if OWN_VARIABLE in os.environ else Settings()
    return found | {KEYS[name].words[0]: own[name].value for name in own if KEYS[name].family == family}


# Axis of the mesh -> the field that holds its size.
AXES = {
    key.words[1]: key.words[0]
    for key in (rows.MESH_REPLICAS, rows.MESH_SHARDS, *rows.MODEL_AXES, rows.MESH_EXPERT)
}
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism: with `enable_sequence_parallel` each process computes norms, residuals and dropout
    for some positions of the sequences."""

    enable_async_tp: bool = False
    enable_sequence_parallel: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism: how keys and values are exchanged, "allgather" or "alltoall"."""

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
class PipelineParallelConfig:
    """Options of pipelines: the schedule, how many stages each process has, and with which modules stages begin."""

    pp_schedule: str = "1F1B"
    pp_stages_per_process: int | None = None
    pp_split_points: list[str] | None = None


@dataclass
class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism, as older scripts request it; the same as `ParallelismConfig(tp_size=)`."""

    argument = "torch_tp_plugin"

    tp_size: int = 1
    torch_device_mesh: Any = None

    def objections(self) -> Iterator[Problem]:
        """Refuse any size above one, and a mesh made by the script."""
        if self.tp_size != 1:
            fix = "is set by parallelism_config=ParallelismConfig(tp_size=...); leave the plugin out"
            yield Problem("TorchTensorParallelPlugin.tp_size", self.tp_size, fix)
        if self.torch_device_mesh is not None:
            fix = "is not used: the mesh follows from the number of processes"
            yield Problem("TorchTensorParallelPlugin.torch_device_mesh", self.torch_device_mesh, fix)


_HANDLERS: dict[str, type] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "pp": PipelineParallelConfig,
}
# As the ranks are laid out, outermost first; see `core.mesh.AXES`.
_MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")


def _in_use(axes: tuple[str, ...], doc: str) -> property:
    return property(lambda config: [axis for axis in axes if config.size(axis) > 1], doc=doc)


def _is_used(axis: str, doc: str) -> property:
    return property(lambda config: config.size(axis) > 1, doc=doc)


def _ranks(view: View, doc: str) -> property:
    return property(lambda config: config.mesh.size(view), doc=doc)


_SIZE = at_least(1)


@described()
@dataclass
class ParallelismConfig(Options, Plugin):
    """The size of each axis. The product of all but `ep_size` is the number of processes: experts are divided among
    processes that train on different samples.

    Fields that are None are read from the variables `PARALLELISM_CONFIG_*` of the launcher. Sizes are 1 by default.
    """

    argument = "parallelism_config"

    dp_replicate_size: int | None = setting(None, rows.MESH_REPLICAS.doc, bounds=_SIZE)
    dp_shard_size: int | None = setting(None, rows.MESH_SHARDS.doc, bounds=_SIZE)
    tp_size: int | None = setting(None, "Processes of tensor parallelism.", bounds=_SIZE)
    cp_size: int | None = setting(None, "Processes of context parallelism.", bounds=_SIZE)
    cp_backend: str | None = setting(None, "Implementation of context parallelism.")
    sp_size: int | None = setting(None, "Processes of sequence parallelism.", bounds=_SIZE)
    sp_backend: str | None = setting(None, "Implementation of sequence parallelism.")
    tp_handler: TorchTensorParallelConfig | None = setting(None, "Options of tensor parallelism.")
    cp_handler: TorchContextParallelConfig | None = setting(None, "Options of context parallelism.")
    sp_handler: DeepSpeedSequenceParallelConfig | None = setting(None, "Options of sequence parallelism.")
    pp_size: int | None = setting(None, "Processes of a pipeline.", bounds=_SIZE)
    pp_handler: PipelineParallelConfig | None = setting(None, "Options of pipelines.")
    ep_size: int | None = setting(None, rows.MESH_EXPERT.doc, bounds=_SIZE)

    device_mesh = None  # not a field: made by `get_device_mesh`

    def __post_init__(self) -> None:
        usual = {**dict.fromkeys(AXES.values(), 1), "cp_backend": "torch", "sp_backend": "deepspeed"}
        for name, value in {**usual, **launched("mesh")}.items():
            if name in usual and getattr(self, name) is None:
                setattr(self, name, value)
        refuse(self._contradictions())
        for axis, options in _HANDLERS.items():
            if self.size(axis) > 1 and getattr(self, f"{axis}_handler") is None:
                setattr(self, f"{axis}_handler", options())

    @classmethod
    def from_env(cls) -> ParallelismConfig:
        """The layout that the launcher of this process set."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """The sizes that are not 1, as `parallelism_config` takes them."""
        return {AXES[axis]: self.size(axis) for axis in AXES if self.size(axis) > 1}

    def size(self, axis: str) -> int:
        """Processes along `axis`, a key of `AXES`."""
        return int(getattr(self, AXES[axis]))

    dp_dim_names = _in_use(DATA_AXES, "Axes in use along which processes have different batches.")
    non_dp_dim_names = _in_use(("pp", "tp", "cp", "sp"), "Axes in use along which processes share a batch.")
    dp_shard_cp_dim_names = _in_use(("dp_shard", "cp"), "Axes in use along which weights are sharded.")
    dp_cp_dim_names = _in_use((*DATA_AXES, "cp"), "Axes in use along which losses are averaged.")
    active_mesh_dims = _in_use(("pp", *DATA_AXES, "tp", "cp", "sp"), "All axes in use.")
    dp_replicate_enabled = _is_used("dp_replicate", "True if there is more than one replica of the model.")
    dp_shard_enabled = _is_used("dp_shard", "True if replicas are sharded.")
    tp_enabled = _is_used("tp", "True if tensor parallelism is requested.")
    cp_enabled = _is_used("cp", "True if context parallelism is requested.")
    sp_enabled = _is_used("sp", "True if sequence parallelism is requested.")
    pp_enabled = _is_used("pp", "True if a pipeline is requested.")
    data_parallel_size = _ranks("data", "Processes with different batches.")
    non_data_parallel_size = _ranks("model", "Processes that share each of those batches.")
    total_size = _ranks("all", "The number of processes of this layout.")

    @property
    def mesh(self) -> Mesh:
        """The axes of the processes."""
        return Mesh(
            replicate=self.size("dp_replicate"),
            shard=self.size("dp_shard"),
            context=self.size("cp"),
            sequence=self.size("sp"),
            tensor=self.size("tp"),
            pipeline=self.size("pp"),
        )

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of the mesh of sharded data parallelism."""
        return ["dp_replicate", "dp_shard_cp"] if self.dp_replicate_enabled else ["dp_shard_cp"]

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh of this layout, made at the first call. Collective then. Raises ConfigError for another
        `device_type` than that of the mesh, or none at the first call.
        """
        made = self.device_mesh
        if made is None:
            if device_type is None:
                fix = 'is needed to make the mesh, for example "cuda"'
                raise ConfigError(Problem("ParallelismConfig.get_device_mesh.device_type", None, fix))
            self.device_mesh = made = self.build_device_mesh(device_type)
        elif device_type not in (None, made.device_type):
            fix = f"the mesh was made for {made.device_type!r}; leave it out"
            raise ConfigError(Problem("ParallelismConfig.get_device_mesh.device_type", device_type, fix))
        return made

    def build_device_mesh(self, device_type: str) -> Any:
        """A new `DeviceMesh` of the axes in use, with the joint axes "dp", "dp_shard_cp" and "dp_cp"; None without any
        axis, and for a sequence split by DeepSpeed, which has groups of its own. Collective. `device_type` is "cuda",
        "cpu" and so on.

        For code of a script. Prepared models have a mesh of their own: `accelerator.torch_device_mesh`.
        """
        names = tuple(axis for axis in _MESH_ORDER if axis in self.active_mesh_dims)
        if not names or self.sp_enabled:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from windlass.dist.gang import current

        mesh = init_device_mesh(device_type, tuple(map(self.size, names)), mesh_dim_names=names)
        joint = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        flat = [mesh[tuple(axes)]._flatten(name) for name, axes in joint.items() if axes]
        for group in (*mesh.get_all_groups(), *(one.get_group() for one in flat)):
            current().limit(group)
        return mesh

    def _contradictions(self) -> Iterator[Problem]:
        """Problems that no implementation could run."""
        where = type(self).__name__
        yield from super().objections()
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != known:
                yield Problem(f"{where}.{name}", getattr(self, name), f"must be {known}")

    def objections(self, processes: int | None = None) -> Iterator[Problem]:
        """Options that are not built, and a product of sizes that is not `processes`, unless that is None."""
        if self.tp_handler is not None and self.tp_handler.enable_async_tp:
            fix = "is not built: exchanges are not overlapped with products; leave it out"
            yield Problem("TorchTensorParallelConfig.enable_async_tp", True, fix)
        if processes is not None and self.total_size not in (1, processes):
            fix = f"the axes' product is {self.total_size}, and there are {processes} processes"
            yield Problem(f"{type(self).__name__}.dp_shard_size", self.dp_shard_size, fix)


# The words that distributed scripts compare with, and nothing in Windlass does: precisions, compilers, gradient
# hooks.
#
# Members are strings, so `"fp16" == PrecisionType.FP16` holds.


class SageMakerDistributedType(Word):
    """How a managed service distributes a job; only for configuration files that name it."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(Word):
    """Providers of the machines of a job."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class PrecisionType(Word):
    """The dtype of matrix products; `no` is that of the weights."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class CustomDtype(Word):
    """Formats of weights without a PyTorch dtype, for planning the devices of a model's layers."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(Word):
    """Compression of gradients during communication."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(Word):
    """Backends of `torch.compile`, in any case; `NO` compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@described(SECTIONS["ddp_config"])
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How a model is replicated."""

    handles = "ddp"

    dim: int = setting(
        0, "The axis of the batch.", refused="must be 0: batches are distributed along their first axis"
    )
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = setting(
        False, "Without effect in PyTorch.", refused="has no effect in current PyTorch versions; leave it out"
    )
    gradient_as_bucket_view: bool = setting(
        False, "Gradients are views of the communication buckets; both values mean that."
    )
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)


@described(SECTIONS["fp8_config"])
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How linear layers multiply in float8, through torchao; with `mixed_precision="fp8"`.

    Attributes:
        config: a `torchao.float8.Float8LinearConfig`, which replaces all other options.
        module_filter_func: function (module, its name) -> True for linear layers to convert; by default all except the
            first and the last. Sizes that are not multiples of 16 are left as they are in any case.
        pad_inner_dim: pad the number of tokens to the multiple of 16 that the kernels need; None means True.
        enable_fsdp_float8_all_gather: no effect: sharded parameters are gathered in bf16, with the same results.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; None: that of the launcher, or "tensorwise".
        emulate: True computes without the hardware, for tests.
    """

    handles = "float8"

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    recipe: str | None = field(default=None, kw_only=True)
    emulate: bool | None = field(default=None, kw_only=True)

    def settings(self) -> dict[str, Any]:
        """What was set, under the names of a launch file."""
        config = self.config
        said = {name: getattr(self, name) for name in _FLOAT8_WORDS} if config is None else {}
        if config is not None:
            gathers = getattr(config, "enable_fsdp_float8_all_gather", False)
            said = {"emulate": config.emulate, "enable_fsdp_float8_all_gather": gathers}
        return {name: value for name, value in said.items() if value is not None}

    def objections(self) -> Iterator[Problem]:
        """Problems of these options."""
        if self.config is None:
            return
        if type(self.config).__name__ != "Float8LinearConfig":
            fix = "must be a torchao.float8.Float8LinearConfig; set recipe= for one of its recipes by name"
            yield Problem("AORecipeKwargs.config", self.config, fix)
        for name in _FLOAT8_WORDS:
            if getattr(self, name) is not None:
                fix = "is part of config=, which is given too; set it there"
                yield Problem(f"AORecipeKwargs.{name}", getattr(self, name), fix)


_FLOAT8_WORDS = ("pad_inner_dim", "enable_fsdp_float8_all_gather", "recipe", "emulate")


@described(SECTIONS["dynamo_config"])
@dataclass
class TorchDynamoPlugin(KwargsHandler, Plugin):
    """How the model is compiled. Names of backends may have any case; "no" compiles nothing.

    Fields that are None are read from the variables `ACCELERATE_DYNAMO_*` of the launcher.
    """

    argument = "dynamo_plugin"

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        launcher = launched("dynamo")
        for name, word in _DYNAMO_WORDS.items():
            if getattr(self, name) is None:
                setattr(self, name, launcher.get(word, _NO_DYNAMO[name]))
        self.backend = DynamoBackend(str(self.backend).upper())

    def to_dict(self) -> dict[str, Any]:
        """All options, with the backend in the compiler's spelling."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The options of `torch.compile` that differ from the defaults."""
        changed = {name: value for name, value in self.to_dict().items() if value != _NO_DYNAMO[name]}
        changed.pop("use_regional_compilation", None)  # not an option of torch.compile
        return changed


# Fields that a launcher sets -> the word in its variables.
_DYNAMO_WORDS = {
    "backend": "backend",
    "mode": "mode",
    "fullgraph": "use_fullgraph",
    "dynamic": "use_dynamic",
    "use_regional_compilation": "use_regional_compilation",
}
_NO_DYNAMO: dict[str, Any] = {
    "backend": "no",
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
    "options": None,
    "disable": False,
    "use_regional_compilation": False,
}
