"""Some rows of a prepared dataset, which the page of a run shows; and what a mixture is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.text.encoder import IGNORED
from windlass.text.mixture import DatasetMixture
from windlass.text.summary import TextSummary
from windlass.trainer.batch_rows import sample_of

_SAMPLES = 3  # of each dataset


def kept_samples(dataset: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the first rows of a prepared dataset, or of each source of a mixture, as `samples.json` has them; none of
    a stream, and of rows that are not prepared text.
    """
    sources = dataset.sources if isinstance(dataset, DatasetMixture) else {"train": dataset}
    return [sample for name, rows in sources.items() for sample in _samples(name, rows, tokenizer)]


def _samples(name: str, rows: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    if not hasattr(rows, "__len__") or tokenizer is None:
        return
    for number in range(min(len(rows), _SAMPLES)):
        row = rows[number]
        if isinstance(row, Mapping):
            for which, sample in _in_row(row, tokenizer):
                yield {"name": f"{name}, row {number}{which}", **sample}


def _in_row(row: Mapping[str, Any], tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a prepared row holds: its text, or the answers to its prompt."""
    if {"input_ids", "labels"} <= row.keys():
        labels = list(row["labels"])
        yield "", sample_of(list(row["input_ids"]), [label != IGNORED for label in labels], tokenizer)
    elif "prompt_ids" in row:
        prompt = list(row["prompt_ids"])
        judged = {True: "desirable", False: "undesirable"}
        label = judged[bool(row["label"])] if "label" in row else None
        for name in ("chosen", "rejected", "completion"):
            if f"{name}_ids" in row:
                answer = list(row[f"{name}_ids"])
                trained = [False] * len(prompt) + [True] * len(answer)
                which = "" if name == "completion" else f", {name}"
                yield which, sample_of(prompt + answer, trained, tokenizer, label=label)


def mixture_facts(dataset: Any, summaries: Mapping[str, TextSummary]) -> dict[str, Any]:
    """Return what an epoch of a mixture is made of, by source: the share that was wanted, that of its samples and of
    their tokens, and how often the source is read. Empty for another dataset.
    """
    if not isinstance(dataset, DatasetMixture):
        return {}
    counts, wanted = dataset.counts, dataset.wanted
    means = {name: _mean_tokens(summaries.get(f"train {name}")) for name in counts}
    tokens = {name: count * (means[name] or 0.0) for name, count in counts.items()}
    total = sum(tokens.values()) if all(means.values()) else 0.0
    facts = {}
    for name, count in counts.items():
        by_tokens = f", {tokens[name] / total:.2%} of the tokens" if total else ""
        used = f"{count / len(dataset):.2%} of the samples{by_tokens}"
        passes = count / len(dataset.sources[name])
        facts[f"mixture: {name}"] = f"wanted {wanted[name]:.2%}; used {used}; {passes:.3g} times an epoch"
    return facts


def _mean_tokens(summary: TextSummary | None) -> float | None:
    """Tokens of a row of a prepared dataset, packed ones counted as one row."""
    rows = 0 if summary is None else summary.packed_rows or summary.rows
    return None if summary is None or not rows else summary.tokens / rows
