"""A system message in a column of its own is part of the conversation, once, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.errors import DataError
from windlass.text.forms import Form, standardised

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}


@pytest.mark.parametrize("column", [None, "", "Be brief."])
@pytest.mark.parametrize("said", [False, True])
def test_a_conversation_has_one_system_message(column: Any, said: bool) -> None:
    turns = [{"from": "system", "value": "Be brief."}] * said + [{"from": "human", "value": "Why?"}]
    found = standardised({"system": column, "conversations": turns}, Form.SHAREGPT, "text", True)
    assert found == {"messages": [SYSTEM, USER] if said or column else [USER]}


def test_two_different_system_messages_are_refused() -> None:
    row = {"system": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}]}
    with pytest.raises(DataError, match="different system messages"):
        standardised(row, Form.SHAREGPT, "text", True)


def test_a_system_message_without_a_template_is_refused() -> None:
    row = {"instruction": "Why?", "output": "So.", "system": "Be brief."}
    assert standardised(row, Form.ALPACA, "text", True)["prompt"] == [SYSTEM, USER]
    with pytest.raises(
        DataError, match="column 'system' has a text, and Alpaca's prompt has no place for it"
    ):
        standardised(row, Form.ALPACA, "text", False)
    assert standardised({**row, "system": None}, Form.ALPACA, "text", False)["completion"] == "So."


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"history": [["Who?", "I."]]}, "column 'history' has earlier turns"),
        ({"system": ["Be brief."]}, "column 'system' must hold text, not list"),
    ],
)
def test_turns_that_would_be_left_out_are_refused(column: Any, said: str) -> None:
    row = {"instruction": "Why?", "output": "So.", "history": [], "system": None}
    assert standardised(row, Form.ALPACA, "text", True)["prompt"] == [USER]
    with pytest.raises(DataError, match=said):
        standardised({**row, **column}, Form.ALPACA, "text", True)


def test_a_message_that_its_weight_leaves_out_is_refused() -> None:
    answer = {"role": "assistant", "content": "So.", "weight": 0}
    with pytest.raises(DataError, match=r"messages\[1\] has the weight 0"):
        standardised({"messages": [USER, answer]}, Form.MESSAGES, "text", True)
    kept = [{**USER, "weight": None}, {**answer, "weight": 1}]
    assert standardised({"messages": kept}, Form.MESSAGES, "text", True) == {"messages": kept}
