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
