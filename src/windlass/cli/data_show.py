"""`windlass data show`: samples as text, with the trained tokens in colour or in brackets."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from windlass.cli.data_source import open_source
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.output import STDOUT, say, shown
from windlass.core.terminal import can_redraw
from windlass.text.encoder import IGNORED
from windlass.text.forms import recognise_form, standardised
from windlass.text.located_rows import LocatedRows
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions

_COLOUR, _PLAIN = "\x1b[32m", "\x1b[0m"
_BRACKETS = ("⟦", "⟧")


def show_command(options: argparse.Namespace) -> int:
    """Print the form of a dataset, some samples, and what the marks mean."""
    source = open_source(options.source, options.overrides)
    split = source.splits.get(options.split)
    if split is None:
        raise DataError(f"there is no split {options.split!r}; there is: {', '.join(source.splits)}")
    rows, settings = split.rows, split.options
    span = slice(options.start, options.start + options.rows) if options.start >= 0 else slice(0)
    chosen = LocatedRows(rows[span], rows.places[span])
    if not chosen:
        raise ConfigError(
            Problem("--start", options.start, f"must be less than the number of rows, {len(rows)}")
        )
    form = recognise_form(chosen[0], settings.dataset_text_field)
    say(f"{len(rows):,} rows, {form.value}")
    if source.tokenizer is None:
        for number, row in enumerate(chosen, options.start):
            say(f"--- row {number}")
            say("\n".join(_described(standardised(row, form, settings.dataset_text_field, True))))
        say("Set tokenizer=NAME to see the tokens that a model is trained on.")
        return 0
    _print_tokens(chosen, source.tokenizer, settings, options.start)
    return 0


def _described(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        is_chat = isinstance(value, list) and value and isinstance(value[0], Mapping)
        if is_chat and "role" in value[0]:
            yield from (f"{message['role']}: {message.get('content')}" for message in value)
        else:
            yield f"{name}: {value}"


def _print_tokens(rows: LocatedRows, tokenizer: Any, options: TextOptions, first: int) -> None:
    coloured = can_redraw(STDOUT) and not os.environ.get("NO_COLOR")
    marks = (_COLOUR, _PLAIN) if coloured else _BRACKETS
    for number, (row, place) in enumerate(zip(rows, rows.places, strict=True), first):
        found = prepare_text(LocatedRows([row], [place]), tokenizer, options.of_tokens())
        (ids, labels), summary = found.dataset[0].values(), found.summary
        assert summary is not None
        cut = ", truncated" if summary.truncated else ""
        say(f"--- row {number}: {len(ids)} tokens, {summary.trained_tokens} trained{cut}")
        # Not `say`, which would make the colours visible as text.
        STDOUT.write(marked(ids, labels, tokenizer, marks) + "\n")
    sample = f"{marks[0]}trained{marks[1]}"
    STDOUT.write(f"--- {sample} tokens have a label; all others are read, and have no loss\n")


def marked(ids: Sequence[int], labels: Sequence[int], tokenizer: Any, marks: tuple[str, str]) -> str:
    """Return the text of a row, with `marks` around what has a label. Control characters are shown escaped."""
    pairs = zip(ids, labels, strict=True)
    pieces = []
    for trained, group in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = shown(tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False))
        pieces.append(f"{marks[0]}{text}{marks[1]}" if trained else text)
    return "".join(pieces)
