"""`use_liger_kernel`: parts of a model of transformers replaced by the Triton kernels of the package `liger_kernel`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem, did_you_mean
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.module_state import without_adapters
from windlass.core.optional import require
from windlass.transforms.strategy import device_of

logger = get_job_logger(__name__)

_TRITON = ("cuda", "xpu", "npu")  # kinds of devices that the package has kernels for


def apply_liger(model: nn.Module, options: Mapping[str, bool]) -> None:
    """Replace the parts of `model` for which there are kernels, in place.

    On other devices, and for models without kernels, the model keeps its own operations, with a warning: they compute
    the same in more memory.

    Args:
        model: on its device; the base of an adapter is changed.
        options: part -> use its kernel, as the package names them: "rope", "rms_norm", "swiglu", ...

    Raises:
        ConfigError: there is no such part. MissingDependencyError: the package is not installed.
    """
    kind = device_of(model).type
    if kind not in _TRITON:
        warn_once(
            logger,
            f"use_liger_kernel: Liger's kernels need a GPU; on {kind} the model's own operations are used",
        )
        return
    library: Any = require(
        "liger_kernel.transformers.monkey_patch", "use Liger's kernels (use_liger_kernel=True)"
    )
    base = without_adapters(model)
    name = str(getattr(getattr(base, "config", None), "model_type", type(base).__name__))
    apply = library.MODEL_TYPE_TO_APPLY_LIGER_FN.get(name)
    if apply is None:
        warn_once(logger, f"use_liger_kernel: Liger has no kernels for {name}; its own operations are used")
        return
    parts = [part for part in inspect.signature(apply).parameters if part != "model"]
    for part, value in options.items():
        if part not in parts:
            fix = f"Liger has no such kernel for {name}{did_you_mean(part, parts)}; known: {', '.join(parts)}"
            raise ConfigError(Problem(f"liger_kernel_config.{part}", value, fix))
    apply(model=base, **options)
    logger.info("Liger's kernels replace parts of %s", type(base).__name__)
