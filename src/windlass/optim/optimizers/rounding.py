"""Weights in half precision that do not lose updates below their resolution.

A bf16 number has 8 significant bits, so that `w + u` is `w` for every update `|u| < |w| / 512`. Kahan summation adds
what was lost to the next update; stochastic rounding rounds up with the probability that makes the mean exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core import xla
from windlass.core.rng import new_generator
from windlass.dist.sharded import part


def add_compensated_(weights: list[Tensor], errors: list[Tensor], updates: list[Tensor]) -> None:
    """`weights += updates + errors`; `errors` becomes what rounding lost (Kahan 1965, doi:10.1145/363707.363723)."""
    torch._foreach_add_(errors, updates)
    before = [weight.clone() for weight in weights]
    torch._foreach_add_(weights, errors)
    torch._foreach_sub_(before, weights)
    torch._foreach_add_(errors, before)


def add_stochastically_(weight: Tensor, update: Tensor, seed: int) -> None:
    """`weight += update`, rounded to bf16 upwards or downwards at random, unbiased (arXiv:2010.06192).

    Args:
        weight: bf16.
        update: fp32.
        seed: equal seeds give equal results. On PyTorch/XLA, which has no generators but that of its device, that one
            draws: its state is the seed.
    """
    exact = weight.float() + update
    weight.copy_(round_up_or_down(exact, _noise(exact, seed)))


def seed_of(parameter: Tensor, group: int, position: int, step: int) -> int:
    """A seed that differs between updates, parameters (by their group and position in it) and parts of a parameter, and
    is equal on ranks that have the same part: their copies stay equal.
    """
    seed = step
    for number in (group, position, *part(parameter).offsets):
        # Generators take seeds of 64 bits at most.
        seed = (seed * 1_000_003 + number + 1) % (1 << 61)
    return seed


def _noise(like: Tensor, seed: int) -> Tensor:
    """16 random bits for each element."""
    generator = None if like.device.type == "xla" else new_generator(like.device, seed)
    return torch.randint(0, 1 << 16, like.shape, generator=generator, device=like.device, dtype=torch.int32)


def round_up_or_down(exact: Tensor, noise: Tensor) -> Tensor:
    """bf16 is the upper half of fp32: adding 16 random bits below it carries with the right probability."""
    if exact.device.type == "xla":
        # -65536 is 0xFFFF0000: it clears the lower half.
        rounded = xla.numbers_of((xla.bits_of(exact) + noise) & -65536)
    else:
        rounded = ((exact.view(torch.int32) + noise) & -65536).view(torch.float32)
    # A carry out of a NaN whose bits are all set would turn it into -0.
    return torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)
