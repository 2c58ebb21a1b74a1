"""The words that distributed scripts compare against: kinds of job, precisions, trackers, compilers, gradient hooks.

Members are strings with the values that scripts know, so `state.distributed_type == "MULTI_CPU"` holds as well.
"""

from __future__ import annotations

from enum import EnumMeta

from windlass.config.enums import Choice


class _Contains(EnumMeta):
    """Lets `"fp16" in PrecisionType` ask for a value, which Python does by itself from 3.12 on."""

    def __contains__(cls, item: object) -> bool:
        return isinstance(item, cls) or item in [member.value for member in cls]  # type: ignore[var-annotated]


class Word(Choice, metaclass=_Contains):
    """A choice that knows whether it contains a value, and lists its values."""

    @classmethod
    def list(cls) -> list[str]:
        """All values, in order of definition."""
        return [str(member.value) for member in cls]


class DistributedType(Word):
    """What kind of job this is: one process, several on one kind of device, or an engine that spreads the model."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


def distributed_type_of(device: str, processes: int) -> DistributedType:
    """The kind of a job of `processes` processes on devices of type `device` ("cpu", "cuda", "xpu", ...)."""
    if processes == 1:
        return DistributedType.NO
    kind = {"cuda": "GPU"}.get(device, device.upper())
    return DistributedType(f"MULTI_{kind}")


class SageMakerDistributedType(Word):
    """How a managed service spreads a job; kept because configuration files name it."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(Word):
    """Which library computes in eight bits."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(Word):
    """Where the machines of a job come from."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class PrecisionType(Word):
    """The type that matrix products are computed in; `no` is that of the weights."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(Word):
    """Experiment trackers; `all` means every one that is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(Word):
    """Generators that can be made equal on all processes: torch's own, a device's, or one that a sampler was given."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(Word):
    """Widths of weights for which PyTorch has no type, when planning where a model's layers go."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(Word):
    """How gradients are compressed on their way between processes."""

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
