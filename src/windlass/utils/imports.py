"""What is installed, and what this machine can compute on: `is_..._available()`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from windlass.core.optional import is_available


def _packages(*names: str) -> Callable[[], bool]:
    """A question whether all of these packages are installed; asking imports none of them."""

    def available() -> bool:
        return all(map(is_available, names))

    available.__doc__ = f"Whether {' and '.join(names)} can be imported."
    return available


def _device(kind: str) -> Callable[[], bool]:
    def available() -> bool:
        import torch

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator is not None and accelerator.type == kind

    available.__doc__ = f"Whether this process computes on {kind}."
    return available


is_aim_available = _packages("aim")
is_amdsmi_available = _packages("amdsmi")
is_bnb_available = _packages("bitsandbytes")
is_boto3_available = _packages("boto3")
is_clearml_available = _packages("clearml")
is_comet_ml_available = _packages("comet_ml")
is_datasets_available = _packages("datasets")
is_deepspeed_available = _packages("deepspeed")
is_dvclive_available = _packages("dvclive")
is_import_timer_available = _packages("import_timer")
is_lomo_available = _packages("lomo_optim")
is_matplotlib_available = _packages("matplotlib")
is_megatron_lm_available = _packages("megatron")
is_mlflow_available = _packages("mlflow")
is_msamp_available = _packages("msamp")
is_pandas_available = _packages("pandas")
is_peft_available = _packages("peft")
is_pynvml_available = _packages("pynvml")
is_pytest_available = _packages("pytest")
is_rich_available = _packages("rich")
is_sagemaker_available = _packages("sagemaker")
is_schedulefree_available = _packages("schedulefree")
is_swanlab_available = _packages("swanlab")
is_timm_available = _packages("timm")
is_torch_xla_available = _packages("torch_xla")
is_torchao_available = _packages("torchao")
is_torchdata_available = _packages("torchdata")
is_torchvision_available = _packages("torchvision")
is_tqdm_available = _packages("tqdm")
is_trackio_available = _packages("trackio")
is_transformer_engine_available = _packages("transformer_engine")
is_transformers_available = _packages("transformers")
is_triton_available = _packages("triton")
is_wandb_available = _packages("wandb")

is_cuda_available = _device("cuda")
is_hpu_available = _device("hpu")
is_mlu_available = _device("mlu")
is_mps_available = _device("mps")
is_musa_available = _device("musa")
is_neuron_available = _device("neuron")
is_npu_available = _device("npu")
is_sdaa_available = _device("sdaa")
is_xpu_available = _device("xpu")


def is_tensorboard_available() -> bool:
    """Whether event files for TensorBoard can be written, by its own package or by tensorboardX."""
    return is_available("tensorboard") or is_available("tensorboardX")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata has a loader that remembers its place."""
    return is_available("torchdata") and importlib.util.find_spec("torchdata.stateful_dataloader") is not None


def is_rocm_available() -> bool:
    """Whether this PyTorch was built for AMD's devices and finds one."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Whether processes can meet over Intel's collective library."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_xccl_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this process's device computes in bf16."""
    import torch

    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Whether this process's device computes in fp16; every one that PyTorch has does."""
    return True


def is_fp8_available() -> bool:
    """False: eight-bit training is not built."""
    return False


def is_weights_only_available() -> bool:
    """Whether PyTorch can read files of tensors without running what is in them; every supported version can."""
    return True
