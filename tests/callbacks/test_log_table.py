"""Numbers, words and rows, as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.log_table import LogTable, clock_text, seconds_text, short_number, words_of

SFT = {
    "loss": 2.4921, "grad_norm": 1.08, "learning_rate": 1.726e-4, "entropy": 2.037, "mean_token_accuracy": 0.5551,
    "num_tokens": 9212.0, "epoch": 3.3333,
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (61.9, "1:01"),
        (3600, "1:00:00"),
        (float("inf"), "-:--"),
        (float("nan"), "-:--"),
        (-1, "-:--"),
    ],
)
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (18_449, "18.4k"), (6.134, "6.13"), (3e-4, "3.0e-04"), (0, "0"), (0.0, "0"), (1, "1.00"), (0.08467, "0.0847"),
        (-0.25, "-0.250"), (612.4, "612"), (999.4, "999"), (999.6, "1.00k"), (1_234_567, "1.23M"), (7.5e9, "7.50G"),
        (999_999, "1.00M"), (0.0009996, "1.0e-03"), (1e30, "1.0e30"),
        (-1e300, "-1.0e300"), (1e16, "1.0e16"), (2e-300, "2e-300"), (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_short_numbers(number: float, text: str) -> None:
    assert short_number(number) == text


@given(st.floats(1e-98, 1e300))
def test_a_short_number_is_short_and_near(number: float) -> None:
    text = short_number(number)
    size = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert len(text) <= 7
    assert float(text.rstrip("kMGT")) * size == pytest.approx(number, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1234, "0.12 s"), (2, "2.0 s"), (9.5, "9.5 s"), (35.2, "35 s"), (65, "1:05")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_words_of_an_evaluation_and_of_a_summary() -> None:
    evaluation = {
        "eval_loss": 0.1281, "eval_runtime": 2.5, "eval_samples_per_second": 14153.0, "eval_steps_per_second": 1768.0,
        "eval_f1": 0.5, "best": True, "folds": 12_345, "epoch": 1.0,
    }  # fmt: skip
    assert words_of(evaluation, 9) == [
        "eval_loss 0.128", "eval_f1 0.500", "best True", "folds 12345", "epoch 1.00", "2.5 s", "14.2k samples/s",
    ]  # fmt: skip
    assert words_of({**evaluation, "eval_mean_token_accuracy": 0.5}, 9, brief=True) == [
        "eval_loss 0.128", "f1 0.500", "best True", "folds 12345", "accuracy 0.500", "2.5 s",
    ]  # fmt: skip
    summary = {"train_runtime": 2.5, "train_samples_per_second": 14153.0, "train_loss": 0.2}
    assert words_of(summary, 9, brief=True) == ["train_loss 0.200", "2.5 s", "14.2k samples/s"]
    stream = {"train_steps_per_second": 2.0, "total_flos": 1e9, "note": "x" * 12}
    assert words_of(stream, 12)[0] == "note " + "x" * 12
    assert words_of(stream, 9) == ["note xxxxxxxxx... (12 characters)", "2.00 steps/s"]


def test_rows_are_in_columns() -> None:
    table = LogTable(100_000)
    lines = [
        *table.lines(10, SFT, 79),
        *table.lines(99_990, {**SFT, "loss": 0.02, "num_tokens": 18_449.0}, 79),
    ]
    assert lines == [
        "  step     loss  grad_norm       lr  entropy  accuracy   tokens    epoch",
        "    10     2.49       1.08  1.7e-04     2.04     0.555    9.21k     3.33",
        " 99990   0.0200       1.08  1.7e-04     2.04     0.555    18.4k     3.33",
    ]


def test_heads_are_repeated_and_grow_with_what_is_logged() -> None:
    table = LogTable(100)
    lines = [table.lines(step, {"loss": 1.0, "epoch": 0.5}, 79) for step in range(41)]
    assert [step for step, printed in enumerate(lines) if len(printed) == 2] == [0, 20, 40]
    head, row = table.lines(41, {"loss": 1.0, "mine": 2, "epoch": 0.5}, 79)
    assert head.split() == ["step", "loss", "mine", "epoch"]
    assert row.split() == ["41", "1.00", "2.00", "0.500"]
    (row,) = table.lines(42, {"epoch": 0.5}, 79)
    assert row == "  42" + "0.500".rjust(27)


def test_columns_without_room_are_named_once() -> None:
    table = LogTable(100)
    note, head, row = table.lines(10, SFT, 40)
    assert note.split() == ["no", "room", "for", "entropy", "mean_token_accuracy", "num_tokens", "epoch",
                            "(see", "metrics.jsonl)"]  # fmt: skip
    assert max(map(len, note.split("\n"))) <= 40
    assert head == "step     loss  grad_norm       lr"
    assert row == "  10     2.49       1.08  1.7e-04"
    (row,) = table.lines(20, SFT, 40)
    head, row = table.lines(30, SFT, 79)  # the terminal was made wider
    assert head.split()[-1] == "epoch"
    assert row.split()[-1] == "3.33"


def test_an_event_is_folded() -> None:
    table = LogTable(100)
    assert table.event(40, ["eval_loss 1.20", "2.5 s"], 79) == "  40  eval_loss 1.20  2.5 s"
    assert table.event(None, ["saved"], 79) == "      saved"
    assert (
        table.event(40, ["eval_loss 1.20", "eval_f1 0.500"], 25)
        == "  40  eval_loss 1.20\n      eval_f1 0.500"
    )
