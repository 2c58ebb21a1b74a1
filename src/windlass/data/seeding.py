"""Randomness of reading data: seeded by position, kept apart from the rest of the program, and cheap when unused."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from windlass.core.errors import DataError
from windlass.core.rng import STREAM_COLLATE, STREAM_ORDER, derive_seed, seed_generators

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_TORCH = torch.default_generator
_draw_python = random.random
_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Sandbox:
    """Lends Python's, NumPy's and PyTorch's default CPU generators to the data, and restores them after (20 us)."""

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


class DrawWatch:
    """Detects draws from one of the three generators, at a fifth of the cost of seeding them.

    NumPy's and PyTorch's states are compared as bytes. Python's cannot be read so cheaply: a twin is kept in
    step with it, and two numbers are drawn for each batch, one before and one after. If reading did draw, all three
    are restored.

    Calls that look free in a tight loop cost microseconds between the forward and the backward of a step, where their
    code is cold; hence memory is read here, rather than the libraries asked.
    """

    def __init__(self) -> None:
        self._twin = random.Random(0)
        self._draw_twin = self._twin.random
        self._bits: Any = None
        self.drew = False

    def __reduce__(self) -> Any:
        # A worker constructs its own: the twin is in step with the generator of this process.
        return DrawWatch, ()

    def __enter__(self) -> DrawWatch:
        if _draw_python() != self._draw_twin():
            self._twin.setstate(random.getstate())  # other code drew: synchronize the twin
        self._gauss = _PYTHON.gauss_next
        bits = get_bit_generator()
        if bits is not self._bits:
            self._bits, self._twister = bits, _memory_of(bits)
        self._numpy = self._twister.tobytes()
        self._torch = _TORCH.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        self.drew = (
            _draw_python() != self._draw_twin()
            or _PYTHON.gauss_next is not self._gauss
            or self._twister.tobytes() != self._numpy
            or _differ(_TORCH.get_state(), self._torch)
        )
        if self.drew:
            random.setstate(self._twin.getstate())
            _PYTHON.gauss_next = self._gauss
            self._twister[:] = self._numpy
            _TORCH.set_state(self._torch)


def _memory_of(bits: Any) -> memoryview:
    """NumPy's default generator as it lies in memory: a Mersenne twister's 624 words, and the position in them. Raises
    DataError if a script has set another kind of generator, whose state has another shape.
    """
    if not isinstance(bits, np.random.MT19937):
        raise DataError(
            f"NumPy's default generator was replaced by {type(bits).__name__}; reading data repeatably needs the "
            "Mersenne twister it comes with: leave it, and give code of yours a generator of its own"
        )
    words = (ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address)
    return memoryview(words).cast("B")


def _differ(state: torch.Tensor, earlier: torch.Tensor) -> bool:
    return bool(_compare_memory(state.data_ptr(), earlier.data_ptr(), state.numel()))


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


def set_epochs(epoch: int, *parts: object) -> None:
    """Call `set_epoch` of those parts that have it."""
    for part in parts:
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)


def first_seed(generator: object) -> int | None:
    """The initial seed of a user's `torch.Generator`; None for anything else."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def collator_reseeder(collate: object) -> Callable[[int, int], None] | None:
    """How to seed a collator's own generator by (its seed, epoch, first sample); None if it has no seed.

    Detected by `seed`, `generator` and `get_generator(seed)`, as in masked-language-model collators. Without it, such a
    generator would continue from batch to batch, and a resumed run would mask other tokens.
    """
    while hasattr(collate, "collate"):
        collate = collate.collate
    make, seed = getattr(collate, "get_generator", None), getattr(collate, "seed", None)
    if make is None or seed is None:
        return None

    def reseed(epoch: int, first: int) -> None:
        collate.generator = make(derive_seed(STREAM_COLLATE, seed, epoch, first))  # type: ignore[attr-defined]

    return reseed
