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


def _never() -> bool:
    """Return False: it is not built."""
    return False


is_aim_available = _package("aim")
is_amdsmi_available = _package("amdsmi")
is_azureml_available = _package("azureml")
is_boto3_available = _package("boto3")
is_clearml_available = _package("clearml")
is_codecarbon_available = _package("codecarbon")
is_comet_available = _package("comet_ml")
is_comet_ml_available = _package("comet_ml")
is_dagshub_available = _package("dagshub")
is_datasets_available = _package("datasets")
is_deepspeed_available = _package("deepspeed")
is_dvclive_available = _package("dvclive")
is_flyte_deck_standard_available = _package("flytekitplugins")
is_flytekit_available = _package("flytekit")
is_import_timer_available = _package("import_timer")
is_kubeflow_available = _package("kubeflow")
is_lomo_available = _package("lomo_optim")
is_matplotlib_available = _package("matplotlib")
is_megatron_lm_available = _package("megatron")
is_mlflow_available = _package("mlflow")
is_msamp_available = _package("msamp")
is_neptune_available = _package("neptune")
is_optuna_available = _package("optuna")
is_pandas_available = _package("pandas")
is_peft_available = _package("peft")
is_pynvml_available = _package("pynvml")
is_pytest_available = _package("pytest")
is_ray_available = _package("ray")
is_ray_tune_available = _package("ray")
is_rich_available = _package("rich")
is_sagemaker_available = _package("sagemaker")
is_schedulefree_available = _package("schedulefree")
is_swanlab_available = _package("swanlab")
is_timm_available = _package("timm")
is_torchao_available = _package("torchao")
is_torchdata_available = _package("torchdata")
is_torchvision_available = _package("torchvision")
is_tqdm_available = _package("tqdm")
is_trackio_available = _package("trackio")
is_transformer_engine_available = _package("transformer_engine")
is_transformers_available = _package("transformers")
is_triton_available = _package("triton")
is_wandb_available = _package("wandb")

is_cuda_available = _device("cuda")
is_mlu_available = _device("mlu")
is_musa_available = _device("musa")
is_neuron_available = _device("neuron")
is_npu_available = _device("npu")
is_sdaa_available = _device("sdaa")
is_xpu_available = _device("xpu")

# What they ask about is not built, whatever is installed.
is_4bit_bnb_available = _never
is_8bit_bnb_available = _never
is_bitsandbytes_multi_backend_available = _never
is_pippy_available = _never
is_transformer_engine_mxfp8_available = _never


def is_torch_distributed_available() -> bool:
    """Return True if PyTorch was built with collectives."""
    import torch.distributed as dist

    return dist.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed, and `USE_TORCH_XLA` does not switch it off. Raises ValueError if both are
    asked for.

    Args:
        check_is_tpu, check_is_gpu: return True only if its devices are of this kind (starts its runtime).
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
