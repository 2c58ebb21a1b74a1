"""Whether a script has made its loop yet."""

from __future__ import annotations

from windlass.compat.state import GradientState


def is_initialized() -> bool:
    """Return True once there is an `Accelerator`, so that `AcceleratorState()` is known."""
    return GradientState().initialized
