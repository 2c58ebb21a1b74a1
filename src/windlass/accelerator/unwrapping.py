"""From the model that a loop calls back to the module that its author wrote."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from windlass.accelerator.forward import restore_forward


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made this wrapper."""
    # The compiler costs seconds to import, and without it nothing was compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """The module behind wrappers of data parallelism. The wrappers stay as they are, and can go on training it.

    Args:
        keep_fp32_wrapper: False takes mixed precision off its forward.
        keep_torch_compile: False takes the compiler's wrapper off too.
        recursive: also unwrap its submodules.
    """
    compiled: Any = model if is_compiled_module(model) else None
    module: Any = model if compiled is None else compiled._orig_mod
    while isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        module = module.module
    if recursive:
        for name, child in module.named_children():
            setattr(module, name, extract_model_from_parallel(child, recursive=True))
    if not keep_fp32_wrapper:
        # It was put on what was prepared: the module, or the compiler's wrapper, which passes attributes through.
        restore_forward(module if compiled is None or "forward" in vars(module) else compiled)
    if compiled is None or not keep_torch_compile:
        return module  # type: ignore[no-any-return]
    # Another wrapper: the one that is given holds the replicas that reduce gradients.
    same = module is compiled._orig_mod
    return compiled if same else type(compiled)(module, compiled.dynamo_ctx)  # type: ignore[no-any-return]
