"""Loops that the user owns, on the executors and strategies that the Trainer uses."""

from windlass.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
