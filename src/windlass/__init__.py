"""Windlass trains and fine-tunes PyTorch models, and never lets the load slip back."""

__version__ = "0.1.0"
