"""`windlass data prepare`: tokenize a dataset, and keep the result where training finds it."""

from __future__ import annotations

import argparse

from windlass.cli.data_source import open_source
from windlass.cli.schema import Recipe
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say, say_json
from windlass.finetuning.prepared_text import prepare_kept
from windlass.text.summary import TextSummary
from windlass.text.token_store import default_cache

_BAR = 40


def prepare_command(options: argparse.Namespace) -> int:
    """Prepare each split, and print its counts and the lengths of its rows."""
    source = open_source(options.source, options.overrides)
    if isinstance(source, Recipe):
        fix = "tokenizes its text when training starts, which reads nothing that was prepared; use task sft"
        raise ConfigError(Problem("task", options.source, fix))
    if source.tokenizer is None:
        raise ConfigError(Problem("tokenizer", None, "name one: tokenizer=NAME"))
    summaries = {}
    for name, split in source.splits.items():
        found = prepare_kept(split.rows, source.tokenizer, split.options, name)
        assert found.summary is not None
        summaries[name] = found.summary.to_dict()
        if not options.json:
            say(f"{name}: {found.summary}")
            say("\n".join(histogram_lines(found.summary)))
    if options.json:
        say_json({"kept_in": default_cache(), "splits": summaries})
    else:
        say(f"kept in {default_cache()}")
    return 0


def histogram_lines(summary: TextSummary) -> list[str]:
    """Return a line of text for each range of lengths."""
    most = max((rows for _, rows in summary.histogram), default=1)
    return [
        f"{low:>9,} to {2 * low - 1:>9,} tokens {rows:>10,} {'#' * round(_BAR * rows / most)}".rstrip()
        for low, rows in summary.histogram
    ]
