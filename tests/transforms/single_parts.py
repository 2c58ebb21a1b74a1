"""Which part of a model differs on divided sequences, in float64: what the model itself computes in single precision.

`torchrun --nproc-per-node 2 -m tests.transforms.single_parts` prints, for each family and each set of parts that is
computed in float64, the first module whose output differs, the largest difference of a module, and that of a gradient
as a share of it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tests.trainer import context_cases
from torch import Tensor, nn

from windlass.cli.proving.proving_rank import double_precision
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.transforms.context import DividedForwards
from windlass.transforms.zigzag import Zigzag

PARTS = {"deep gemma3": ("norms",), "deep deepseek_v2": ("rotations", "routers")}
_ENDINGS = {"norms": "RMSNorm", "routers": "Router"}


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with double_precision():
            return function(*args, **options)

    return call


def _widened(model: nn.Module, parts: tuple[str, ...], patched: dict[str, Any]) -> nn.Module:
    """`model`, with these parts in float64. What is replaced in its file is kept in `patched`."""
    for module in model.modules():
        if any(type(module).__name__.endswith(_ENDINGS.get(part, "no class")) for part in parts):
            module.forward = _wide(module.forward)  # type: ignore[method-assign]
    names = inspect.unwrap(type(model).forward).__globals__
    rotate = patched.setdefault("apply_rotary_emb", names.get("apply_rotary_emb"))
    if rotate is not None:
        names["apply_rotary_emb"] = _wide(rotate) if "rotations" in parts else rotate
    return model


def _outputs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs of the modules of a training forward, in order, and the gradients."""
    found: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[[Any, Any, Any], None]:
        def note(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if name and isinstance(tensor, Tensor):
                found[name] = tensor.detach()

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in model.named_modules()]
    context_cases.token_loss(model(**batch, use_cache=False), batch["labels"]).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(name: str, parts: tuple[str, ...], ranks: Gang) -> tuple[str, float, float]:
    """The first module that differs, and the largest differences of a module's output and of a gradient."""
    patched: dict[str, Any] = {}
    whole = context_cases.model(name).train()
    divided = _widened(copy.deepcopy(whole), parts, patched)
    _widened(whole, parts, patched)
    batch = context_cases.collate(context_cases.samples(4)[2:])
    rows, length = batch["input_ids"].shape
    missing = -length % (2 * ranks.size)
    zigzag = Zigzag(ranks.size, length + missing)

    def of_part(tensor: Tensor) -> Tensor:
        return zigzag.part(nn.functional.pad(tensor, (0, 0, 0, missing)), ranks.rank)

    expected, gradients = _outputs(whole, batch)
    held = DividedForwards(divided, ranks)
    found, own = _outputs(divided, batch)
    held.release()
    _widened(whole, (), patched)
    real = of_part(batch["attention_mask"][..., None])
    off: dict[str, float] = {}
    for key, value in expected.items():
        if key in found and (value.shape[:2] == (rows, length) or len(value) == rows * length):
            part = of_part(value.reshape(rows, length, -1))
            off[key] = float(((found[key].reshape(part.shape) - part) * real).abs().max())
    worst = 0.0
    for key, gradient in own.items():
        dist.all_reduce(gradient)
        error = (gradient / ranks.size - gradients[key]).abs().max() / gradients[key].abs().max()
        worst = max(worst, float(error))
    return next((key for key, value in off.items() if value), "none"), max(off.values()), worst


def _choices(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(parts, n) for n in range(len(parts) + 1))


def main() -> None:
    ranks = join(world_from_environment(), torch.device("cpu"), mesh=Mesh(context=2)).over("context")
    for name, parts in PARTS.items():
        for chosen in _choices(parts):
            first, module, gradient = differences(name, chosen, ranks)
            if ranks.rank == 1:
                print(f"{name}, {' and '.join(chosen) or 'nothing'} in float64: first {first}, "
                      f"modules by {module:.1g}, gradients by {gradient:.1g} of them")  # fmt: skip
            assert (gradient < 1e-13) == (chosen == parts), (name, chosen, gradient)
    leave()


if __name__ == "__main__":
    main()
