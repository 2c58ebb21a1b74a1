"""`debug="underflow_overflow"`: stop at the first module whose weights or output are not finite, and show how it came.

Each forward of each module is noted with the smallest and the largest absolute value of its weights, inputs and
outputs. Reading them waits for the device, so a run with it is slow.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import NonFiniteError
from windlass.core.output import say
from windlass.core.trees import tensors_in

_HEAD = "abs min  abs max  metadata"


class DebugUnderflowOverflow:
    """Notes the forwards of a model, from its construction on.

    Args:
        model: all of its modules are watched.
        max_frames_to_save: how many forwards of modules the report shows.
        trace_batch_nums: print each forward of these batches (from 0), and do not stop in them.
        abort_after_batch_num: stop after this batch.

    Raises:
        NonFiniteError: in a forward, if a weight or an output is NaN or infinite; with the last forwards.
        RuntimeError: after batch `abort_after_batch_num`.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model, self.batch_number = model, 0
        self.trace_batch_nums = list(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.frames: deque[str] = deque(maxlen=max_frames_to_save)
        names = {module: name for name, module in model.named_modules()}
        self._handles = [
            module.register_forward_hook(partial(self._note, name or "(the model)"), with_kwargs=True)
            for module, name in names.items()
        ]

    def remove(self) -> None:
        """Watch the model no longer."""
        for handle in self._handles:
            handle.remove()

    def _note(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a forward. Waits for the device."""
        parts: dict[str, dict[str, Tensor]] = {
            "weight": dict(module.named_parameters(recurse=False)),
            "input": _numbered("input", [args, kwargs]),
            "output": _numbered("output", output),
        }
        lines = [f"                  {name} {type(module).__name__}"]
        wrong = ""
        for kind, tensors in parts.items():
            for what, tensor in tensors.items():
                low, high = _extent(tensor)
                lines.append(f"{low:8.2e} {high:8.2e} {what}")
                # An attention mask may be an infinite input.
                if kind != "input" and not math.isfinite(high) and not wrong:
                    wrong = f"{what} of {name} ({type(module).__name__}) is not finite"
        self.frames.append("\n".join(lines))
        # A traced batch is to be seen to its end, so that nothing stops it.
        traced = self.batch_number in self.trace_batch_nums
        if traced:
            say(self.frames.pop())
        elif wrong:
            raise NonFiniteError(
                f"{wrong}, in batch {self.batch_number}. The last {len(self.frames)} forwards of modules:\n{_HEAD}\n"
                + "\n".join(self.frames)
            )
        if module is not self.model:
            return
        self.batch_number += 1
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise RuntimeError(
                f"stopped after {self.batch_number} batches: abort_after_batch_num={self.abort_after_batch_num}"
            )


@contextlib.contextmanager
def watching(model: nn.Module, on: bool) -> Iterator[None]:
    """Context in which forwards of `model` are watched, if `on`."""
    if not on:
        yield
        return
    watch = DebugUnderflowOverflow(model)
    try:
        yield
    finally:
        watch.remove()


def _numbered(what: str, nest: Any) -> dict[str, Tensor]:
    found = [tensor for tensor in tensors_in(nest) if tensor.is_floating_point()]
    return {f"{what}[{number}]": tensor for number, tensor in enumerate(found)}


def _extent(tensor: Tensor) -> tuple[float, float]:
    """Smallest and largest absolute value; NaN if there is one."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local  # the part of a sharded weight
    if not local.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(local.abs())
    return float(low), float(high)
