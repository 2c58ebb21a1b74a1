"""`windlass data prepare`: tokenize a dataset, and keep the result where training finds it."""

from __future__ import annotations

import argparse
from pathlib import Path

from windlass.callbacks.displays import Display, open_display
from windlass.cli.data_source import open_source
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say
from windlass.text.prepare_text import prepare_text
from windlass.text.summary import TextSummary
from windlass.text.token_store import default_cache

_BAR = 40


def prepare_command(options: argparse.Namespace) -> int:
    """Prepare each split, and print its counts and the lengths of its rows."""
    source = open_source(options.source, options.overrides)
    if source.tokenizer is None:
        raise ConfigError(Problem("tokenizer", None, "name one: tokenizer=NAME"))
    folder = Path(options.cache) if options.cache else default_cache()
    for name, rows in source.splits.items():
        display = open_display(len(rows), f"prepare {name}")

        def advance(done: int, _: int, display: Display = display) -> None:
            display.advance(done)

        found = prepare_text(rows, source.tokenizer, source.options, cache=folder, progress=advance)
        display.close()
        assert found.summary is not None
        say(f"{name}: {found.summary}")
        say("\n".join(histogram_lines(found.summary)))
    say(f"kept in {folder}")
    return 0


def histogram_lines(summary: TextSummary) -> list[str]:
    """Return a line of text for each range of lengths."""
    most = max((rows for _, rows in summary.histogram), default=1)
    return [
        f"{low:>9,} to {2 * low - 1:>9,} tokens {rows:>10,} {'#' * round(_BAR * rows / most)}".rstrip()
        for low, rows in summary.histogram
    ]
