"""What is installed, and what this machine can compute on: `is_..._available()`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from windlass.core.optional import is_available


def _package(name: str) -> Callable[[], bool]:
    """A question whether a package is installed; asking does not import it."""

    def available() -> bool:
        return is_available(name)

    available.__doc__ = f"Whether {name} can be imported."
    return available


def _device(kind: str) -> Callable[[], bool]:
    def available() -> bool:
        import torch

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator is not None and accelerator.type == kind

    available.__doc__ = f"Whether this process computes on {kind}."
    return available


_PACKAGES = (
    "aim", "amdsmi", "boto3", "clearml", "comet_ml", "datasets", "deepspeed", "dvclive", "import_timer", "matplotlib",
    "mlflow", "msamp", "pandas", "peft", "pynvml", "pytest", "rich", "sagemaker", "schedulefree", "swanlab", "timm",
    "torch_xla", "torchao", "torchdata", "torchvision", "tqdm", "trackio", "transformer_engine", "transformers",
    "triton", "wandb",
)  # fmt: skip
_OTHERWISE_NAMED = {"bnb": "bitsandbytes", "lomo": "lomo_optim", "megatron_lm": "megatron"}
_DEVICES = ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")
_QUESTIONS = {
    f"is_{word}_available": question
    for word, question in (
        *((package, _package(package)) for package in _PACKAGES),
        *((word, _package(package)) for word, package in _OTHERWISE_NAMED.items()),
        *((kind, _device(kind)) for kind in _DEVICES),
    )
}


def __getattr__(name: str) -> Callable[[], bool]:
    if name not in _QUESTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _QUESTIONS[name]


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
