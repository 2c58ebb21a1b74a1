"""The nearest known word to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if none is similar."""
    candidates = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return candidates[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` to append to a sentence; empty if no word is similar."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""
