"""Whatever a metric is, what is kept of it is plain data: numbers for numbers, text where not."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from windlass.core.errors import ConfigError
from windlass.core.metric_values import number_in, plain_metrics, plain_value, python_number


class Color(enum.Enum):
    RED = 1


class Rank(enum.IntEnum):
    SECOND = 2


class Word(str, enum.Enum):  # noqa: UP042 (scripts write both)
    HIGH = "high"


@dataclasses.dataclass
class Pair:
    a: int = 1


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("no text")


cycle: list[Any] = []
cycle.append(cycle)

NUMBERS = [
    (Decimal("0.5"), 0.5), (Decimal("-Infinity"), -math.inf), (Fraction(1, 4), 0.25), (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5), (np.longdouble(0.25), 0.25), (np.int64(3), 3), (np.bool_(True), True), (np.array(1.5), 1.5),
    (np.array([[2]]), 2), (torch.tensor(1.5, requires_grad=True), 1.5), (torch.tensor([2]), 2),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor(True), True), (Rank.SECOND, 2), (7, 7), (True, True),
    (None, None), ("text", "text"), (Word.HIGH, "high"), (np.str_("word"), "word"),
]  # fmt: skip

NESTED = [
    (np.arange(2), [0, 1]), (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]), (torch.zeros(0), []),
    (np.array([1, Decimal(2)], dtype=object), [1, 2.0]), ((np.float32(1), [2]), [1.0, [2]]),
    ({3: np.float32(1), "3": 2}, {"3": 1.0, "'3'": 2}), ({"b", "a"}, ["a", "b"]),
    ({"deep": {"x": torch.tensor(1)}}, {"deep": {"x": 1}}),
]  # fmt: skip

TEXTS = [
    (1 + 2j, "(1+2j)"), (b"ab", "b'ab'"), (Path("/x/y"), "/x/y"), (Color.RED, "Color.RED"), (Pair(), "Pair(a=1)"),
    (datetime.datetime(2020, 1, 2), "2020-01-02T00:00:00"), (datetime.timedelta(1), "1 day, 0:00:00"),
    (np.datetime64("2020-01-01"), "2020-01-01"), (np.timedelta64(3, "s"), "3 seconds"), (torch.tensor(1j), "1j"),
    (torch.zeros((), device="meta"), "tensor(..., device='meta', size=())"), (object(), "<object object>"),
    (Decimal("1E+999"), "1E+999"), (Decimal("sNaN"), "sNaN"), (1 << 2000, "an int of 2,001 bits"), (Odd(), "<Odd>"),
    (int, "<class 'int'>"), (torch.float32, "torch.float32"), (cycle, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), NUMBERS + NESTED)
def test_numbers_of_every_kind_are_kept_as_numbers(value: Any, expected: Any) -> None:
    found = plain_value(value, "m")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(("value", "expected"), TEXTS)
def test_the_rest_becomes_text_and_one_warning_names_the_metric(
    value: Any, expected: str | None, capsys: Any
) -> None:
    name = f"kind of {type(value).__name__} {expected}"
    found = [plain_value(value, name), plain_value(value, name)]
    if expected is not None:
        assert found == [expected, expected]
    assert capsys.readouterr().err.count(repr(name)) == 1
    json.dumps(found, allow_nan=False)


def test_text_can_always_be_written() -> None:
    assert plain_metrics({"\ud800": "\ud800é"}) == {"\\ud800": "\\ud800é"}
    assert plain_metrics({1: 2, (1, 2): 3}) == {"1": 2, "(1, 2)": 3}


def test_a_tracker_gets_what_it_may_know_as_it_is() -> None:
    image = object()
    assert python_number({"a": np.float64(1), "image": image, 3: ["x"]}) == {
        "a": 1.0,
        "image": image,
        "3": ["x"],
    }


@pytest.mark.parametrize(
    "value", [1, 0.5, True, math.nan, Decimal("0.5"), torch.tensor([1.0]), np.float32(2)]
)
def test_what_is_a_number_can_be_compared(value: Any) -> None:
    number = number_in({"eval_m": value}, "eval_m", "m")
    assert type(number) is float
    assert number == float(value) or math.isnan(number)


@pytest.mark.parametrize("value", ["0.5", None, 1j, [1.0, 2.0], {"f1": 1.0}, b"1", 1 << 2000])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"metric_for_best_model='m'.*eval_m = .*is not a number"):
        number_in({"eval_m": value}, "eval_m", "m")
