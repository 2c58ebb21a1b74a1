"""Rows know where they come from, and errors about them name the place."""

from __future__ import annotations

import pytest
from tests.text.tokenizers import byte_tokenizer

from windlass.core.errors import DataError
from windlass.text.forms import LocatedRows, RowError
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions


def test_an_error_names_the_place_of_its_row() -> None:
    error = RowError(1, "is empty")
    assert str(error) == "row 1: is empty"
    assert str(error.located(["a", "b"])) == "row 1: is empty"
    assert str(error.located(LocatedRows([{}, {}], ["f:3", "f:9"]))) == "f:9: is empty"


@pytest.mark.parametrize("workers", [1, 2])
def test_places_are_found_through_workers_and_formatting(workers: int) -> None:
    rows = LocatedRows([{"text": "a"}] * 600, (f"file:{2 * n}" for n in range(600)))
    rows[555] = {"text": None}
    with pytest.raises(DataError, match=r"^file:1110: column 'text' is missing or null"):
        prepare_text(rows, byte_tokenizer(), TextOptions(num_proc=workers))
    with pytest.raises(
        DataError, match=r"^file:1110: formatting_func must return the text of the row, not NoneType"
    ):
        prepare_text(rows, byte_tokenizer(), TextOptions(formatting_func=lambda row: row["text"]))
