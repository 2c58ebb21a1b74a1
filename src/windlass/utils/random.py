"""Names that scripts import from here (`windlass.accelerator.rng`)."""

from windlass.accelerator.rng import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
