"""Sizes as a person reads them."""

from __future__ import annotations


def in_words(size: float) -> str:
    """Return bytes in the largest unit that is at most the size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"
