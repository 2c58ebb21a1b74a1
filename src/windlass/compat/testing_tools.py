"""What tests of scripts import: marks for tests that need a device or a package, commands, a problem to regress on."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from windlass.compat.state import AcceleratorState
from windlass.config.kinds import flag
from windlass.core.device import visible_devices
from windlass.core.optional import is_available
from windlass.core.output import say
from windlass.dist.operations import gather

_accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
torch_device = "cpu" if _accelerator is None else _accelerator.type
device_count = visible_devices() or 1


def memory_allocated_func() -> int:
    """Memory that tensors take on the current device, in bytes; 0 on a CPU, or if it is not counted."""
    if _accelerator is None or not hasattr(torch.get_device_module(_accelerator), "memory_allocated"):
        return 0
    return int(torch.get_device_module(_accelerator).memory_allocated(_accelerator))


def get_launch_command(**kwargs: Any) -> list[str]:
    """The command that starts a script with these settings: `["windlass", "launch", "--num_processes=2"]`."""
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in kwargs.items()
        if value is not None and value is not False
    ]
    return ["windlass", "launch", *flags]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: dict[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and show what it printed.

    Args:
        timeout: in seconds.
        quiet: show nothing of its output.
        echo: show the command.

    Raises:
        RuntimeError: it failed; the message has what it wrote to stderr.
        subprocess.TimeoutExpired: it took longer.
    """
    words = list(map(str, cmd))
    if echo:
        say(f"Running: {' '.join(words)}")
    done = subprocess.run(
        words, env=env, stdin=stdin, timeout=timeout, capture_output=True, text=True, check=False
    )
    if not quiet and done.stdout:
        say(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with code {done.returncode}; its stderr:\n{done.stderr}")
    return done


def get_torch_dist_unique_port() -> int:
    """A port for processes to meet at, another one in each worker of pytest-xdist."""
    return 29500 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Whether the tensor has the same values on every process; collective."""
    everywhere = gather(tensor[None].clone().to(AcceleratorState().device)).cpu()
    return all(torch.equal(other, tensor.cpu()) for other in everywhere)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fail unless the body raises such an exception, with `msg` in its text."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    if not isinstance(raised, exception_class):
        raise AssertionError(f"expected {exception_class.__name__}; got {raised!r}") from raised
    if msg is not None and msg not in str(raised):
        raise AssertionError(f"expected {msg!r} in {str(raised)!r}") from raised


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


class RegressionDataset:
    """Samples `{"x": x, "y": a * x + b + noise}`, float32."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        noise = generator.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """`a * x + b`."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


# --- marks ------------------------------------------------------------------------------------------------------------

Mark = Callable[[Any], Any]


def _needs(holds: bool, what: str) -> Mark:
    return unittest.skipUnless(holds, f"test requires {what}")


skip: Mark = unittest.skip("test was skipped")
slow = _needs(flag(os.environ.get("RUN_SLOW", "no")), "RUN_SLOW=yes")
_ON = {
    kind: _needs(torch_device == kind, kind) for kind in ("cuda", "mlu", "mps", "musa", "npu", "sdaa", "xpu")
}
require_cuda, require_mlu, require_mps, require_musa = _ON["cuda"], _ON["mlu"], _ON["mps"], _ON["musa"]
require_npu, require_sdaa, require_xpu = _ON["npu"], _ON["sdaa"], _ON["xpu"]
require_cpu = _needs(torch_device == "cpu", "a machine with nothing but CPUs")
require_non_cpu = _needs(torch_device != "cpu", "an accelerator")
require_non_hpu = _needs(torch_device != "hpu", "a device that is not an hpu")
require_non_xpu = _needs(torch_device != "xpu", "a device that is not an xpu")
require_cuda_or_hpu = _needs(torch_device in ("cuda", "hpu"), "cuda or hpu")
require_cuda_or_xpu = _needs(torch_device in ("cuda", "xpu"), "cuda or xpu")
require_single_device = _needs(torch_device != "cpu" and device_count == 1, "one accelerator")
require_multi_device = _needs(device_count > 1, "several accelerators")
require_single_gpu = _needs(torch_device == "cuda" and device_count == 1, "one GPU")
require_multi_gpu = _needs(torch_device == "cuda" and device_count > 1, "several GPUs")
require_single_xpu = _needs(torch_device == "xpu" and device_count == 1, "one xpu")
require_multi_xpu = _needs(torch_device == "xpu" and device_count > 1, "several xpus")
require_multi_gpu_or_xpu = _needs(
    torch_device in ("cuda", "xpu") and device_count > 1, "several GPUs or xpus"
)
require_fp16: Mark = _needs(True, "fp16")
require_bnb = _needs(is_available("bitsandbytes"), "bitsandbytes")
require_torchvision = _needs(is_available("torchvision"), "torchvision")
require_huggingface_suite = _needs(
    is_available("transformers") and is_available("datasets"), "transformers and datasets"
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Mark for a test that needs this version of PyTorch, or a newer one."""
    from torch.torch_version import TorchVersion

    mark = _needs(TorchVersion(torch.__version__) >= str(version), f"torch {version}")
    return mark if test_case is None else mark(test_case)
