"""Checkpoints: how they are written, committed, verified and read.

Whatever cannot be saved, is missing or damaged, or does not fit is a `CheckpointError` that names the file and the
entry. What the system refuses is its `OSError`. Docstrings name errors only if they differ from that.
"""
