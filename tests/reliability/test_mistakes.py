"""Mistakes that users make are answered by what is wrong, where, and the fix, in at most ten lines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from tests.laws.source import ROOT
from tests.reliability.mistakes.in_commands import COMMANDS
from tests.reliability.mistakes.in_ranks import RANKS
from tests.reliability.mistakes.in_scripts import SCRIPTS
from tests.reliability.mistakes.in_tuning import TUNING
from tests.reliability.mistakes.mistake import Answer, Mistake
from tests.reliability.mistakes.page import PAGE, tables


def of_name(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize("mistake", [*SCRIPTS, *TUNING, *COMMANDS], ids=of_name)
def test_the_answer(mistake: Mistake, tmp_path: Path) -> None:
    answer = mistake.answer(tmp_path)
    assert not answer.faults(mistake), answer.text


@pytest.mark.dist
@pytest.mark.parametrize("mistake", RANKS, ids=of_name)
def test_the_answer_of_two_processes(mistake: Mistake, tmp_path: Path) -> None:
    answer = mistake.answer(tmp_path)
    assert not answer.faults(mistake), answer.text


def test_the_page_lists_them() -> None:
    assert tables() in (ROOT / PAGE).read_text("utf-8")
    assert len({mistake.name for mistake in (*SCRIPTS, *TUNING, *COMMANDS, *RANKS)}) >= 58
    assert all(mistake.words for mistake in (*SCRIPTS, *TUNING, *COMMANDS, *RANKS))


def test_an_answer_can_be_a_bad_one() -> None:
    mistake = Mistake("x", ("row 3", ("a", "b")), lambda folder: None)
    assert Answer("row 3: a", raised=True).faults(mistake) == []
    assert Answer("b", raised=True).faults(mistake) == ["does not name 'row 3'"]
    assert Answer("row 3: c", raised=True).faults(mistake) == ["does not name 'a' or 'b'"]
    assert Answer("row 3: a", raised=False).faults(mistake) == ["no error ended it"]
    assert Answer("row 3: a\n" * 11, raised=True).faults(mistake) == ["11 lines"]
