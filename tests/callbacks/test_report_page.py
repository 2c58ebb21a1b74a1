"""The figures and tables of a run: complete, and safe whatever the metrics are called."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.page_tables import TrainingTime, curve, evaluation_losses, render_details
from windlass.callbacks.run_view import Configured


def details(*given: Any) -> str:
    return "".join(render_details(*given).values())


HISTORY: list[dict[str, Any]] = [
    {"loss": 3.0, "learning_rate": 1e-4, "grad_norm": 1.0, "epoch": 0.5, "step": 10},
    {"eval_loss": 2.5, "eval_accuracy": 0.5, "eval_runtime": 1.0, "epoch": 0.5, "step": 10},
    {"loss": 2.0, "learning_rate": 5e-5, "grad_norm": math.nan, "epoch": 1.0, "step": 20},
    {"eval_loss": 2.25, "eval_accuracy": 0.75, "eval_runtime": 1.0, "epoch": 1.0, "step": 20},
    {"train_runtime": 65.0, "train_samples_per_second": 12.5, "epoch": 1.0, "step": 20},
]


class Page(HTMLParser):
    """The tags and the visible text of a page; fails on a tag that is not closed."""

    VOID = ("meta",)

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.text.append(data)


def test_what_the_page_tells() -> None:
    facts = {
        "environment": {"torch": "2.13"},
        "data": {"rows": "a sentence"},
    }
    skipped = {"step": 15, "skipped_update": 14, "reason": "NaN"}
    rate = Configured("learning_rate", 1e-4, "a.yaml:3")
    page = Page(details([*HISTORY, skipped, skipped], facts, None, [rate]))
    for text in (
        "Training loss", "Best eval_loss", "2.25", "1:05", "12.5 samples per second",
        "eval_accuracy", "1. step 15", "update 14 skipped: NaN",
        "2. step 15", "a sentence", "2.13", "0.0001", "a.yaml:3",
    ):  # fmt: skip
        assert text in page.text, text


@pytest.mark.parametrize(
    ("time", "value", "told"),
    [
        (TrainingTime(2.0, 40.0, 5, 0, 1, 0), "2 s", "20 samples per second"),
        (
            TrainingTime(65.0, None, 130, 0, 2, 30),
            "1:05",
            "2 updates per second, in 2 sessions, 30 updates repeated",
        ),
        (TrainingTime(8.0, 32.0, 4, 1600, 1, 0), "8 s", "4 samples per second, since step 1,600"),
        (TrainingTime(0.0, None, 0, 0, 1, 0), "0 s", ""),
    ],
)
def test_the_time_of_all_sessions_replaces_that_of_the_last(
    time: TrainingTime, value: str, told: str
) -> None:
    page = Page(details(HISTORY, {}, time))
    place = page.text.index("Training time")
    assert page.text[place + 1] == value
    assert (page.text[place + 2] == told) == bool(told)
    assert "Training time of the last session" not in page.text
    assert "train_runtime" not in page.text
    assert "Training time of the last session" in Page(details(HISTORY, {})).text


def test_an_empty_history_has_no_figures() -> None:
    assert details([], {}) == ""


EVIL = '<script>alert("x")</script>'


def test_everything_is_escaped() -> None:
    history = [
        {EVIL: 1.0, f"eval_{EVIL}": 2.0, f"eval_{EVIL}_loss": 3.0, "loss": 1.0, "step": s} for s in (1, 2)
    ]
    facts: dict[str, Any] = {name: {EVIL: EVIL} for name in ("environment", "data")}
    history.append({"step": EVIL, "skipped_update": EVIL, "reason": EVIL})
    page = Page(details(history, facts, None, [Configured(EVIL, EVIL, EVIL)]))
    assert "script" not in page.tags
    assert page.text.count(EVIL) >= 8


VALUE = st.one_of(
    st.floats(), st.integers(), st.text(max_size=5), st.none(), st.booleans(), st.lists(st.integers())
)
ROW = st.dictionaries(
    st.one_of(st.text(max_size=8), st.sampled_from(["loss", "eval_loss", "epoch"])), VALUE, max_size=5
)


@given(rows=st.lists(ROW, max_size=8), facts=st.dictionaries(st.text(max_size=5), VALUE, max_size=3))
def test_no_history_breaks_the_page(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    Page(details([{**row, "step": i} for i, row in enumerate(rows)], {"data": facts}))


def test_curves_are_numbers_only() -> None:
    history = [
        {"a": 1, "step": 1},
        {"a": "x", "step": 2},
        {"a": True, "step": 3},
        {"b": 1},
        {"a": 2.5, "step": 4},
    ]
    assert curve(history, "a") == [(1.0, 1.0), (4.0, 2.5)]


def test_named_evaluation_sets_are_losses_too() -> None:
    history = [{"eval_news_loss": 1.0, "eval_loss_ratio": 1.0, "eval_web_loss": 2.0, "loss": 1.0}]
    assert evaluation_losses(history) == ["eval_news_loss", "eval_web_loss"]


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_a_run_that_blew_up_is_reported(first: float) -> None:
    history = [{"loss": first, "eval_loss": first, "step": 1}]
    assert "NaN" in details(history, {}) or "inf" in details(history, {})
