"""Readers of checkpoints that other programs wrote. `core/outside.py` names those that the core asks for."""
