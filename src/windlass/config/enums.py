"""The words that arguments accept, and why some are not built. Members are strings, so `args.eval_strategy == "steps"`
holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, EnumMeta, StrEnum
from typing import NoReturn

from windlass.core.errors import did_you_mean


class Choice(StrEnum):
    """A string enumeration whose error lists the possible words."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        words = [str(member.value) for member in cls]
        hint = did_you_mean(str(value), words)
        raise ValueError(f"{value!r} is not a valid {cls.__name__}; choose one of {', '.join(words)}{hint}")


class IntervalStrategy(Choice):
    """When a repeated action happens."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


# Its earlier name, which scripts still import.
EvaluationStrategy = IntervalStrategy


class SaveStrategy(Choice):
    """When a checkpoint is written; `best` is at each evaluation that is better than all before it."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(Choice):
    """What is published on the hub, and when: the final model, each save, or checkpoints that can be resumed."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(Choice):
    """Schedules of the learning rate."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


# Schedules that follow an evaluated metric.
METRIC_DRIVEN = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class OptimizerNames(Choice):
    """All optimizer names that scripts use; the support table lists which are built."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"
    MUON = "muon"


class DebugOption(Choice):
    """Debugging aids: detection of overflow and underflow; metrics of PyTorch/XLA."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class ParallelMode(Enum):
    """How the processes of a job share the work. Windlass only has the first and the third: one device per process."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    TPU = "tpu"


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


class FP8BackendType(Word):
    """Libraries of eight-bit training."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


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


REPORT = "report"  # in `report_to`: a page and a picture of the run, beside trackers
_WRITTEN = "metrics.jsonl is always written, and report_to='report' adds report.html"
TRACKER_NOTE = (
    f"is not built; {_WRITTEN}; a GeneralTracker of your own sends logs on with three methods (tracker, "
    "store_init_configuration, log): pass it in a TrackingCallback"
)

# Name -> why the optimizer cannot be used.
UNBUILT_OPTIMIZERS = {
    "adamw_torch_npu_fused": "is not built yet (it needs torch_npu, on whose devices Windlass does not train); use "
    "adamw_torch_fused",
    "adamw_hf": "is gone; use adamw_torch",
    "adamw_apex_fused": "is gone; use adamw_torch_fused",
}
# All others that have a name.
OPTIMIZERS = tuple(str(name) for name in OptimizerNames if name not in UNBUILT_OPTIMIZERS)
PROJECTING_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name.startswith(("galore_", "apollo_")))
IN_BACKWARD_OPTIMIZERS = ("lomo", "adalomo", *(name for name in OPTIMIZERS if name.endswith("_layerwise")))
_OTHER_TRACKERS = ("azure_ml", "codecarbon", "dagshub", "neptune")  # that accelerate does not have
TRACKERS = tuple(
    sorted([*(kind.value for kind in LoggerType if kind is not LoggerType.ALL), *_OTHER_TRACKERS])
)
# Name -> why logs cannot be sent to it by its name, and what to do instead.
UNBUILT_TRACKERS = dict.fromkeys(("flyte", "kubeflow"), TRACKER_NOTE)


def unbuilt_trackers(report_to: list[str]) -> Iterator[tuple[str, str]]:
    """Each name of `report_to` that cannot be reported to, and why."""
    for name in report_to:
        if name in UNBUILT_TRACKERS:
            yield name, UNBUILT_TRACKERS[name]
        elif name not in (*TRACKERS, REPORT, "all"):
            known = ("all", "none", REPORT, *TRACKERS)
            yield name, f"is not a tracker; known names: {', '.join(known)}{did_you_mean(name, known)}"


ACCELERATOR_REFUSED = {
    "megatron_lm_plugin": "Megatron-LM is not built; shard the model with fsdp_plugin",
    "torch_tp_plugin": "a tp_size of 1 is accepted; parallelism_config sets others",
}
