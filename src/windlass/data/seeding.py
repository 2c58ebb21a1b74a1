"""Randomness of reading data: seeded by position, kept apart from the rest of the program, and cheap when unused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from windlass.core.rng import STREAM_COLLATE, STREAM_ORDER, derive_seed, seed_generators

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_TORCH = torch.default_generator
_draw_python, _draw_numpy = random.random, np.random.random_sample


class Sandbox:
    """Python's, NumPy's and PyTorch's default CPU generators, lent to the data and given back as they were (20 us)."""

    def __init__(self) -> None:
        self._bits = np.random.MT19937(0)

    def __enter__(self) -> None:
        self._outside = get_bit_generator(), _TORCH.get_state(), random.getstate()
        set_bit_generator(self._bits)

    def __exit__(self, *_: object) -> None:
        bits, torch_state, python_state = self._outside
        set_bit_generator(bits)
        _TORCH.set_state(torch_state)
        random.setstate(python_state)

    def seed(self, seed: int) -> None:
        """Seed all three, for what is read next (8 us)."""
        seed_generators(seed)


class Watch:
    """Tells whether reading drew from one of the three generators, at a fifth of what seeding them would cost.

    NumPy's generator is exchanged for one that goes in step with a twin; PyTorch's state is compared; Python's goes in
    step with a twin of its own: two draws are taken from it for each batch, one before and one after. Where reading
    did draw, the generators are put back as if it had not.
    """

    def __init__(self) -> None:
        self._bits, self._numpy_twin = np.random.MT19937(0), np.random.RandomState(0)
        self._draw_numpy_twin = self._numpy_twin.random_sample
        set_seeds = get_bit_generator()
        set_bit_generator(self._bits)
        np.random.seed(0)
        set_bit_generator(set_seeds)
        self._python_twin = random.Random(0)
        self.drew = False

    def __reduce__(self) -> Any:
        # A worker makes its own: what goes in step here would not there.
        return Watch, ()

    def __enter__(self) -> Watch:
        if _draw_python() != self._python_twin.random():
            self._python_twin.setstate(random.getstate())  # somebody else drew: fall into step again
        self._gauss = _PYTHON.gauss_next
        self._torch_state = _TORCH.get_state()
        self._torch_bytes = self._torch_state.numpy().tobytes()
        self._outside = get_bit_generator()
        set_bit_generator(self._bits)
        return self

    def __exit__(self, *_: object) -> None:
        numpy_drew = _draw_numpy() != self._draw_numpy_twin()
        set_bit_generator(self._outside)
        self.drew = bool(
            numpy_drew
            or _draw_python() != self._python_twin.random()
            or _PYTHON.gauss_next is not self._gauss
            or _TORCH.get_state().numpy().tobytes() != self._torch_bytes
        )
        if self.drew:
            self._undo()

    def _undo(self) -> None:
        _TORCH.set_state(self._torch_state)
        random.setstate(self._python_twin.getstate())
        _PYTHON.gauss_next = self._gauss
        self._numpy_twin.seed(0)
        set_bit_generator(self._bits)
        np.random.seed(0)
        set_bit_generator(self._outside)


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
