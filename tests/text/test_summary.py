from __future__ import annotations

from windlass.callbacks.page_tables import render_details
from windlass.text.encoder import EncodedRows
from windlass.text.summary import TextSummary
from windlass.text.token_rows import TokenRows


def test_counts_and_lengths() -> None:
    lengths = [1, 2, 3, 3, 4, 17]
    labels = [[5] * (n - 1) + [-100] for n in lengths]
    summary = TextSummary.of(TokenRows.of([EncodedRows([[5] * n for n in lengths], labels)]), 2, [0])
    assert (summary.rows, summary.tokens, summary.trained_tokens, summary.longest) == (6, 30, 24, 17)
    assert summary.histogram == ((1, 1), (2, 3), (4, 1), (8, 0), (16, 1))
    assert TextSummary.from_dict(summary.to_dict()) == summary
    assert str(summary) == "6 rows, 30 tokens (80% trained), longest 17; 2 truncated, 1 dropped"


def test_the_report_of_a_run_shows_them() -> None:
    summary = TextSummary.of(TokenRows.of([EncodedRows([[1] * 70], [[1] * 70])]), 0, range(7))
    page = render_details([], {"data": summary.facts()})["settings"]
    assert "rows of 64 to 127 tokens" in page
    assert '<th scope="row">dropped</th><td class="num">7</td>' in page
