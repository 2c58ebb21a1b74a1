"""Installed packages and devices: `is_..._available()`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from windlass.core import xla
from windlass.core.optional import is_available


def _package(name: str) -> Callable[[], bool]:
    def available() -> bool:
        return is_available(name)

    available.__doc__ = f"Return True if {name} is installed. Does not import it."
    return available


def _device(kind: str) -> Callable[..., bool]:
    # Older devices ask scripts if the device itself is to be checked; here it always is.
    def available(check_device: bool = True) -> bool:
        import torch

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator is not None and accelerator.type == kind

    available.__doc__ = f"Return True if the accelerator of this process is of type {kind}."
    return available


_PACKAGES = (
    "aim", "amdsmi", "azureml", "boto3", "clearml", "codecarbon", "comet_ml", "dagshub", "datasets", "deepspeed",
    "dvclive", "flytekit", "import_timer", "matplotlib", "mlflow", "msamp", "neptune", "optuna", "pandas", "peft",
    "pynvml", "pytest", "ray", "rich", "sagemaker", "schedulefree", "swanlab", "timm", "torchao", "torchdata",
    "torchvision", "tqdm", "trackio", "transformer_engine", "transformers", "triton", "wandb",
)  # fmt: skip
_OTHER_NAMES = {
    "comet": "comet_ml", "flyte_deck_standard": "flytekitplugins", "kubeflow": "kubeflow", "lomo": "lomo_optim",
    "megatron_lm": "megatron", "ray_tune": "ray",
}  # fmt: skip
_DEVICES = ("cuda", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")
# What they ask about is not built, whatever is installed.
_NOT_BUILT = ("4bit_bnb", "8bit_bnb", "bitsandbytes_multi_backend", "pippy", "transformer_engine_mxfp8")


def _never() -> bool:
    """Return False: it is not built."""
    return False


_GENERATED: dict[str, Callable[..., bool]] = {
    f"is_{word}_available": function
    for word, function in (
        *((word, _never) for word in _NOT_BUILT),
        *((package, _package(package)) for package in _PACKAGES),
        *((word, _package(package)) for word, package in _OTHER_NAMES.items()),
        *((kind, _device(kind)) for kind in _DEVICES),
    )
}


def __getattr__(name: str) -> Callable[..., bool]:
    if name not in _GENERATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _GENERATED[name]


def is_torch_distributed_available() -> bool:
    """Return True if PyTorch was built with collectives."""
    import torch.distributed as dist

    return dist.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed, and `USE_TORCH_XLA` does not switch it off.

    Args:
        check_is_tpu, check_is_gpu: return True only if its devices are of this kind (starts its runtime).

    Raises:
        ValueError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu are both True; ask for one of them")
    if not xla.is_selected() or not (check_is_tpu or check_is_gpu):
        return xla.is_selected()
    return xla.kind() == ("TPU" if check_is_tpu else "CUDA")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return True if bitsandbytes is installed, in `min_version` or a later one."""
    return is_available("bitsandbytes") and (min_version is None or _is_at_least("bitsandbytes", min_version))


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return True if PyTorch is of `min_version` or a later one, and the accelerator of this process is Apple's."""
    return _device("mps")() and _is_at_least("torch", min_version)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return True if the accelerator of this process is of type hpu. `init_hccl` has no effect."""
    return _device("hpu")()


def is_habana_gaudi1() -> bool:
    """Return False: it is not supported."""
    return False


def _is_at_least(package: str, version: str) -> bool:
    from windlass.utils.versions import compare_versions

    return compare_versions(package, ">=", version)


def is_tensorboard_available() -> bool:
    """Return True if tensorboard or tensorboardX is installed."""
    return is_available("tensorboard") or is_available("tensorboardX")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return True if torchdata has a stateful loader."""
    return is_available("torchdata") and importlib.util.find_spec("torchdata.stateful_dataloader") is not None


def is_rocm_available() -> bool:
    """Return True if PyTorch was built for ROCm and finds a device."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Return True if PyTorch has Intel's collective library."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_xccl_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if the device of this process computes in bf16."""
    import torch

    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Return True: every device of PyTorch computes in fp16."""
    return True


def is_fp8_available() -> bool:
    """Return True if torchao is installed, through which linear layers multiply in float8; no device is looked at."""
    return is_available("torchao")


def is_weights_only_available() -> bool:
    """Return True: every supported PyTorch can load files of tensors without unpickling objects."""
    return True


NAMES = tuple(
    sorted({*_GENERATED, *(name for name in globals() if name.startswith("is_"))} - {"is_available"})
)
