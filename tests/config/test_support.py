"""The support table: complete, equal to its page, and true."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from windlass.config import support_rows
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import OptimizerNames
from windlass.config.support import SECTIONS, TRAINING_ARGUMENTS, markdown


def test_every_argument_has_a_row_and_every_row_an_argument() -> None:
    assert set(TRAINING_ARGUMENTS) == {f.name for f in dataclasses.fields(TrainingArguments)}
    written = [*support_rows.HONOURED.split(), *support_rows.MAPPED, *support_rows.REFUSED]
    assert len(written) == len(set(written))


def test_the_page_is_what_the_code_says(root: Path) -> None:
    page = (root / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m windlass.config.support > docs/support.md"


def test_whatever_is_not_honoured_says_what_happens() -> None:
    for title, table in SECTIONS.items():
        for name, row in table.items():
            assert row.status == "honoured" or row.note, (title, name)


def test_helpers_exist() -> None:
    assert [
        name for name in SECTIONS["TrainingArguments helpers"] if not hasattr(TrainingArguments, name)
    ] == []


def test_trackers_and_optimizers_are_those_that_scripts_know() -> None:
    pytest.importorskip("transformers")
    from transformers.training_args import OptimizerNames as Theirs

    assert {m.value for m in OptimizerNames} == {m.value for m in Theirs}
    assert set(support_rows.OPTIMIZERS) <= {m.value for m in OptimizerNames}
