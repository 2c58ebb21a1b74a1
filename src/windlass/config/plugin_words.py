"""The words that distributed scripts compare with: kinds of job, precisions, trackers, compilers, gradient hooks.

Members are strings, so `state.distributed_type == "MULTI_CPU"` holds.
"""

from __future__ import annotations

from enum import EnumMeta

from windlass.config.enums import Choice


class _Contains(EnumMeta):
    """Let `"fp16" in PrecisionType` test for a value, as Python does from 3.12 on."""

    def __contains__(cls, item: object) -> bool:
        return isinstance(item, cls) or item in [member.value for member in cls]  # type: ignore[var-annotated]


class Word(Choice, metaclass=_Contains):
    """A choice with a list of its values and a test for them."""

    @classmethod
    def list(cls) -> list[str]:
        """All values, in order of definition."""
        return [str(member.value) for member in cls]


class DistributedType(Word):
    """The kind of a job: one process, several on one kind of device, or an engine that distributes the model."""

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
    if device == "xla":
        return DistributedType.XLA  # one process, and all its devices
    if processes == 1:
        return DistributedType.NO
    kind = {"cuda": "GPU"}.get(device, device.upper())
    return DistributedType(f"MULTI_{kind}")


class SageMakerDistributedType(Word):
    """How a managed service distributes a job; only for configuration files that name it."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(Word):
    """Libraries of eight-bit training."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


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


class LoggerType(Word):
    """Experiment trackers; `all` is all that are installed."""

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
    """Random generators that can be synchronised over processes: torch's, that of a device, or that of a sampler."""

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
