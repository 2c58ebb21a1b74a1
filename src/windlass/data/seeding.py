"""Randomness of reading data: seeded by position, kept apart from the rest of the program, and cheap when unused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from windlass.core.rng import STREAM_ORDER, derive_seed

# The known state in which generators wait while nothing is expected to draw from them, and the first draw
# each would give.
_PYTHON_REST = random.Random(0).getstate()
_PYTHON_FIRST = random.Random(0).random()
_NUMPY_FIRST = np.random.RandomState(0).random_sample()
_TORCH_REST = torch.Generator().manual_seed(0).get_state()
_TORCH_FIRST = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0)).item()

_PROBE = torch.empty((), dtype=torch.int64)


class Sandbox:
    """Python's, NumPy's and PyTorch's default CPU generators, lent to the data and given back afterwards.

    `with sandbox:` leaves NumPy's and PyTorch's generators exactly as they were. Python's is put back too
    where `python` is true; that costs 10 us, and the engine, which seeds it at each update anyway, does
    without.
    """

    def __init__(self, python: bool = True) -> None:
        self._python = python
        self._bits = np.random.MT19937(0)

    def __enter__(self) -> None:
        self._numpy_outside = get_bit_generator()
        self._torch_outside = torch.default_generator.get_state()
        if self._python:
            self._python_outside: Any = random.getstate()
        set_bit_generator(self._bits)

    def __exit__(self, *_: object) -> None:
        set_bit_generator(self._numpy_outside)
        torch.default_generator.set_state(self._torch_outside)
        if self._python:
            random.setstate(self._python_outside)


def rest() -> None:
    """Put all three generators into the known state (5 us)."""
    random.setstate(_PYTHON_REST)
    np.random.seed(0)
    torch.default_generator.set_state(_TORCH_REST)


def disturbed() -> bool:
    """Whether anything drew or seeded since `rest`. Spends the known state."""
    return (
        random.random() != _PYTHON_FIRST
        or np.random.random_sample() != _NUMPY_FIRST
        or _PROBE.random_().item() != _TORCH_FIRST
    )


def fingerprint() -> tuple[Any, ...]:
    """The whole state of the three generators, comparable by `==`; about 60 us."""
    name, keys, *rest = np.random.get_state()
    return (
        random.getstate(),
        name,
        np.asarray(keys).tobytes(),
        rest,
        torch.default_generator.get_state().numpy().tobytes(),
    )


def rewind(generator: object, first: int | None, epoch: int) -> None:
    """Make a user's own `torch.Generator` a function of the epoch: as the user seeded it in epoch 0, derived
    from that later.
    """
    if first is not None and isinstance(generator, torch.Generator):
        generator.manual_seed(first if epoch == 0 else derive_seed(STREAM_ORDER, first, epoch))


def first_seed(generator: object) -> int | None:
    """The seed a user gave to their `torch.Generator`, None for anything else."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None
