"""Randomness of reading data: seeded by position, kept apart from the rest of the program, and cheap when unused."""

from __future__ import annotations

import random
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from windlass.core.rng import STREAM_COLLATE, STREAM_ORDER, derive_seed, seed_generators
from windlass.data.columns import ColumnCollator

_TORCH = torch.default_generator


class Sandbox:
    """Lends Python's, NumPy's and PyTorch's default CPU generators to the data, and restores them after (20 us)."""

    def __init__(self) -> None:
        # NumPy's generator is exchanged for this one: to read and to write back its 624 words takes longer.
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


# Generators of users that `rewind` has seeded: the user's seed, and the one that was set. Older releases of torch have
# no weak references to them; the few that scripts give to loaders stay then.
_rewound: MutableMapping[torch.Generator, tuple[int, int]] = (
    WeakKeyDictionary() if torch.Generator.__weakrefoffset__ else {}
)


def first_seed(generator: object) -> int | None:
    """The seed that a user gave a `torch.Generator`; None for anything else."""
    if not isinstance(generator, torch.Generator):
        return None
    present = generator.initial_seed()
    # A second run with the same loader finds the seed of the epoch that the first one read last. A script that has
    # seeded the generator again wants that seed.
    first, epochs = _rewound.get(generator, (present, present))
    return first if present == epochs else present


def rewind(generator: object, first: int | None, epoch: int) -> None:
    """Make a user's own `torch.Generator` a function of the epoch: as the user seeded it in epoch 0, derived
    from that later. `first` is its `first_seed`.
    """
    if first is not None and isinstance(generator, torch.Generator):
        seed = first if epoch == 0 else derive_seed(STREAM_ORDER, first, epoch)
        generator.manual_seed(seed)
        # As `initial_seed` returns it: PyTorch takes a negative seed for the positive one of the same bits.
        _rewound[generator] = first, generator.initial_seed()


def set_epochs(epoch: int, *parts: object) -> None:
    """Call `set_epoch` of those parts that have it."""
    for part in parts:
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)


class DatasetEpoch:
    """The epoch of a dataset that several loaders of this process may read in turn.

    A training set is often evaluated too, in epoch 0. Each loader sets its epoch again after another one has set a
    different one: otherwise the rest of a pass would be read in the epoch of the evaluation, and a run that is resumed
    there would read other samples than one that was not interrupted.

    Attributes:
        value: the epoch that was set last; None: none was.
    """

    _by_id: ClassVar[WeakValueDictionary[int, DatasetEpoch]] = WeakValueDictionary()

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self.value: int | None = None

    @classmethod
    def of(cls, dataset: object) -> DatasetEpoch:
        """The object that all loaders of `dataset` share."""
        # By `id`, because datasets need not be hashable. The object holds the dataset, so no other one gets its id.
        return cls._by_id.setdefault(id(dataset), cls(dataset))

    def set(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset, if it has one."""
        self.value = epoch
        set_epochs(epoch, self._dataset)


def collator_reseeder(collate: object) -> Callable[..., None] | None:
    """How to seed a collator's own generator by (its seed, epoch, first sample, ...); None if it has no seed.

    Detected by `seed`, `generator` and `get_generator(seed)`, as in masked-language-model collators. Without it, such a
    generator would continue from batch to batch, and a resumed run would mask other tokens.
    """
    while isinstance(collate, ColumnCollator):
        collate = collate.collate
    make, seed = getattr(collate, "get_generator", None), getattr(collate, "seed", None)
    if make is None or seed is None:
        return None

    def reseed(*position: int) -> None:
        collate.generator = make(derive_seed(STREAM_COLLATE, seed, *position))  # type: ignore[attr-defined]

    return reseed
