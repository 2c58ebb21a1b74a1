"""Options of replication, of float8 and of compilation, as objects that scripts pass to `Accelerator`.

`config.parallel.from_plugins` translates them into settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from windlass.compat.exported import launched
from windlass.config.enums import Word
from windlass.config.loop_options import KwargsHandler, Plugin
from windlass.config.parallel.table import SECTIONS
from windlass.config.sections.setting import described, setting
from windlass.core.errors import Problem

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
        changed.pop("use_regional_compilation", None)
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
