"""Starts PyTorch/XLA before the first test: it leaves variables in the environment, and must be first to differentiate."""

from __future__ import annotations

from windlass.core import xla

if xla.is_selected():
    xla.device()
