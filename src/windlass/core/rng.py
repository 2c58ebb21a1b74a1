"""Randomness as a function of position: every seed is derived from (seed, where we are), never from what ran before.

That is what makes a resumed run repeat the same bits in O(1): no stream of draws has to be replayed.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from windlass.core import xla
from windlass.core.tensors import makes_fakes
from windlass.core.types import State

_MASK = (1 << 64) - 1
# Streams of randomness, kept apart so that the same position never means the same draws for two purposes.
STREAM_STEP, STREAM_SAMPLE, STREAM_COLLATE, STREAM_ORDER = 1, 2, 3, 4


# `random.seed` without its conversions: a whole number needs none, and this runs in every step.
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _PYTHON).seed


def derive_seed(*position: int) -> int:
    """A 64-bit seed from whole numbers, well mixed (splitmix64 finaliser, Steele et al. 2014) and order-sensitive."""
    value = 0x9E3779B97F4A7C15
    for part in position:
        value = (value ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 27
        value = value * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and PyTorch's default *CPU* generators directly, in about 7 us; and that of `device`.

    `torch.manual_seed` would visit every backend and cost a hundred times more.
    """
    _seed_python(seed)
    _PYTHON.gauss_next = None  # the half of a pair that `random.gauss` keeps for its next call
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    generator = None if device is None else _accelerator_generator(device)
    if generator is not None:
        generator.manual_seed(seed)


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded generator to draw tensors for `device`, on `generator.device`: PyTorch/XLA has no generators but
    that of its device, so for it this one draws on the host.
    """
    return torch.Generator("cpu" if device.type == "xla" else device).manual_seed(seed)


def _accelerator_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    if device.type == "xla":
        return xla.Generator()
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    return module.default_generators[device.index or 0]


class StepSeeder:
    """Randomness of a training process: PyTorch's generators are seeded at each update, from (seed, update, rank).

    Dropout therefore draws the same in update k whatever ran before it. Python's and NumPy's generators, which cost
    more to seed and are rarely drawn from in a step, are seeded once, by `start`; a checkpoint carries their state.
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._stream = derive_seed(STREAM_STEP, seed, rank)
        generator = _accelerator_generator(device)
        self._seed_device: Callable[[int], Any] | None = None if generator is None else generator.manual_seed

    def start(self, step: int) -> None:
        """Seed all three generators, for a run that begins at update `step` without a state to restore."""
        seed_generators(derive_seed(self._stream, step))

    def __call__(self, step: int) -> None:
        """Make the randomness of update `step` (dropout and the like) what it always is."""
        value = derive_seed(self._stream, step)
        torch.default_generator.manual_seed(value)
        if self._seed_device is not None:
            self._seed_device(value)


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and PyTorch on every device; `deterministic` also asks for deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and let PyTorch use deterministic kernels alone, or fail (with `warn_only`: warn)."""
    set_seed(seed)
    # cuBLAS reads this when its handle is made; set here because the guides' scripts expect this call to do it all.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    # transformers reads this one at each call of flash-attn, whose kernels PyTorch's setting below does not reach.
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def rng_state(device: torch.device) -> State:
    """The generators' states as tensors and numbers, for a checkpoint."""
    version, internal, gauss = random.getstate()
    np_state = np.random.get_state(legacy=False)
    assert isinstance(np_state, dict)
    state: State = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(np_state["state"]["key"].astype(np.int64)),
            "pos": int(np_state["state"]["pos"]),
            "has_gauss": int(np_state["has_gauss"]),
            "gauss": float(np_state["gauss"]),
        },
        "torch": torch.default_generator.get_state(),
    }
    generator = _accelerator_generator(device)
    if generator is not None:
        state["device"], state["device_type"] = generator.get_state(), device.type
    return state


def load_rng_state(state: State, device: torch.device) -> None:
    """Put back what `rng_state` gave. The state of a device of another kind, which means nothing here, is left out."""
    python, numpy_ = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": numpy_["key"].numpy().astype(np.uint32), "pos": numpy_["pos"]},
            "has_gauss": numpy_["has_gauss"],
            "gauss": numpy_["gauss"],
        }
    )
    torch.default_generator.set_state(state["torch"])
    generator = _accelerator_generator(device)
    if generator is not None and "device" in state and state.get("device_type", device.type) == device.type:
        generator.set_state(state["device"])


class preserved_rng:  # noqa: N801 (a context manager, used like a function)
    """Leave the generators exactly as they were found: `with preserved_rng(device): ...`. Nothing is drawn where new
    tensors have no memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: State | None = None

    def __enter__(self) -> None:
        self._state = None if makes_fakes() else rng_state(self._device)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            load_rng_state(self._state, self._device)


class ForwardRandomness:
    """Different randomness on each of several ranks during a forward, and the same again after it.

    The ranks begin with the same state, and draw equally often.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = _accelerator_generator(device), rank
        self._states: tuple[Any, Any] = None, None

    def begin(self) -> None:
        """Draw from generators of this rank from now on."""
        seed = derive_seed(int(torch.empty((), dtype=torch.int64).random_()), self._rank)
        self._states = torch.default_generator.get_state(), self._device and self._device.get_state()
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def end(self) -> None:
        """Continue with what all ranks draw."""
        self._exchange()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within the body, between `begin` and `end`, ranks draw the same."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Continue with the other of the two states."""
        (host, device), own = self._states, self._device
        self._states = torch.default_generator.get_state(), own and own.get_state()
        torch.default_generator.set_state(host)
        if own is not None:
            own.set_state(device)


class PlacedRandomness:
    """Randomness of the parts of an update by their place in it: whatever ran before, and on whichever rank."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start = _accelerator_generator(device), 0

    def begin(self) -> None:
        """Start an update; ranks whose generators are in the same state draw the same at the same places."""
        self._start = int(torch.empty((), dtype=torch.int64).random_())

    def at(self, *place: int) -> None:
        """Draw what belongs to this place from now on."""
        seed = derive_seed(self._start, *place)
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)
