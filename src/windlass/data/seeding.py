"""Randomness of reading data: seeded by position, kept apart from the rest of the program, and cheap when unused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from windlass.core.rng import STREAM_COLLATE, STREAM_ORDER, derive_seed, seed_generators

# The state in which Python's and PyTorch's generators wait while nothing is expected to draw from them, and
# the first draw each would give.
_GLOBAL: Any = random.random.__self__  # type: ignore[attr-defined]
_TORCH = torch.default_generator
_PYTHON_REST = random.Random(0).getstate()[1]
_PYTHON_FIRST = random.Random(0).random()
_TORCH_REST = torch.Generator().manual_seed(0).get_state()
_TORCH_FIRST = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0)).item()
# `random.setstate` without its conversions: this is called for each batch.
_set_python = super(random.Random, _GLOBAL).setstate
_draw_python, _draw_numpy = random.random, np.random.random_sample


class Sandbox:
    """Python's, NumPy's and PyTorch's default CPU generators, lent to the data and given back afterwards.

    `with sandbox:` leaves NumPy's and PyTorch's generators exactly as they were. Python's is put back too
    where `python` is true; that costs 10 us, and the engine, which seeds it at each update anyway, does
    without.
    """

    def __init__(self, python: bool = True) -> None:
        self._python = python
        # While nothing draws, these two go in step, which is cheaper than seeding one of them for each batch.
        self._bits, self._shadow = np.random.MT19937(0), np.random.RandomState(0)
        self._draw_shadow = self._shadow.random_sample
        self._in_step = False
        self._probe = torch.empty((), dtype=torch.int64)
        self._drawn = self._probe.numpy()  # the same memory, read without asking torch

    def __reduce__(self) -> Any:
        # A worker makes its own: copied piece by piece, the two views of one memory would be two memories.
        return Sandbox, (self._python,)

    def __enter__(self) -> None:
        self._numpy_outside = get_bit_generator()
        self._torch_outside = _TORCH.get_state()
        if self._python:
            self._python_outside: Any = random.getstate()
        set_bit_generator(self._bits)

    def __exit__(self, *_: object) -> None:
        set_bit_generator(self._numpy_outside)
        _TORCH.set_state(self._torch_outside)
        if self._python:
            random.setstate(self._python_outside)

    def seed(self, seed: int) -> None:
        """Seed all three, for reading that draws (8 us)."""
        self._in_step = False
        seed_generators(seed)

    def rest(self) -> None:
        """Put all three into a known state, for reading that should not draw (3 us)."""
        _set_python(_PYTHON_REST)
        _GLOBAL.gauss_next = None
        _TORCH.set_state(_TORCH_REST)
        if not self._in_step:
            np.random.seed(0)
            self._shadow.seed(0)
            self._in_step = True

    def disturbed(self) -> bool:
        """Whether anything drew or seeded since `rest`."""
        self._in_step = in_step = _draw_numpy() == self._draw_shadow()
        self._probe.random_()
        return not (in_step and _draw_python() == _PYTHON_FIRST and self._drawn[()] == _TORCH_FIRST)


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


def collator_reseeder(collate: object) -> Callable[[int, int], None] | None:
    """How to seed a collator's own generator by (its seed, epoch, first sample); None where it has no seed.

    Known by `seed`, `generator` and `get_generator(seed)`, as masked-language-model collators have them. Left
    alone, such a generator would go on from batch to batch, and a resumed run would mask other tokens.
    """
    while hasattr(collate, "collate"):
        collate = collate.collate
    make, seed = getattr(collate, "get_generator", None), getattr(collate, "seed", None)
    if make is None or seed is None:
        return None

    def reseed(epoch: int, first: int) -> None:
        collate.generator = make(derive_seed(STREAM_COLLATE, seed, epoch, first))  # type: ignore[attr-defined]

    return reseed
