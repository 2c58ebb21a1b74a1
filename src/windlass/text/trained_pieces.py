"""Token ids as text, in pieces that are trained on or read only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from windlass.core.output import shown
from windlass.core.types import IGNORED

Piece = tuple[str, bool]


def decoded(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of token ids, special tokens included. Control characters are shown escaped."""
    return shown(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def trained_pieces(ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[Piece]:
    """Return the text of a row in pieces, each with whether its tokens have a label."""
    pairs = zip(ids, labels, strict=True)
    return [
        (decoded([token for token, _ in group], tokenizer), trained)
        for trained, group in groupby(pairs, key=lambda pair: pair[1] != IGNORED)
    ]
