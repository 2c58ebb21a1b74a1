"""Starts PyTorch/XLA before the first test: it sets variables, and must be the first to differentiate."""

from __future__ import annotations

from windlass.core import xla

if xla.is_selected():
    xla.device()
