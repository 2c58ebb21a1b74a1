"""The support table: complete, equal to its page, and true."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from tests.docs.support_table import SECTIONS, markdown

from windlass.config import enums
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import OptimizerNames
from windlass.config.sections.setting import rules_of

TRAINING_ARGUMENTS = SECTIONS["TrainingArguments"]


def test_every_argument_has_a_row_and_every_row_an_argument() -> None:
    assert list(TRAINING_ARGUMENTS) == [f.name for f in dataclasses.fields(TrainingArguments)]
    for rules in rules_of(TrainingArguments).values():
        assert not (rules.mapped and rules.refused)


def test_the_page_is_what_the_code_says(root: Path) -> None:
    page = (root / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m tests.docs.support_table > docs/support.md"


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

    assert {m.value for m in OptimizerNames} == {m.value for m in Theirs} | {"muon"}
    assert set(enums.OPTIMIZERS) <= {m.value for m in OptimizerNames}


def test_optimizers_and_schedules_are_those_that_are_registered() -> None:
    from windlass.optim.registry import OPTIMIZERS

    assert set(enums.OPTIMIZERS) == set(OPTIMIZERS)


def test_trackers_are_those_that_are_registered() -> None:
    from windlass.callbacks.tracker_registry import BUILT_IN

    assert enums.TRACKERS == BUILT_IN


@pytest.mark.parametrize("section", ["Callbacks", "Data collators"])
def test_honoured_classes_can_be_imported(section: str) -> None:
    import windlass

    honoured = [name for name, row in SECTIONS[section].items() if row.status == "honoured"]
    assert [name for name in honoured if not hasattr(windlass, name)] == []


def test_the_trainer_is_as_the_table_says() -> None:
    import inspect

    from windlass import Trainer

    taken = set(inspect.signature(Trainer.__init__).parameters)
    assert set(SECTIONS["Trainer constructor"]) <= taken
    honoured = [name for name, row in SECTIONS["Trainer methods"].items() if row.status == "honoured"]
    assert [name for name in honoured if not hasattr(Trainer, name)] == []


# For scripts, or read by the arguments themselves (`log_on_each_node` says which process logs).
_READ_BY_SCRIPTS = {"do_train", "do_eval", "do_predict", "resume_from_checkpoint"}
_READ_IN_CONFIG = {"log_on_each_node", "log_level", "log_level_replica", "accelerator_config"}


def _words_of_the_code(root: Path) -> set[str]:
    """Attributes and texts of all code above the configuration."""
    words: set[str] = set()
    for path in (root / "src" / "windlass").rglob("*.py"):
        parts = path.relative_to(root).parts
        if "config" in parts and "parallel" not in parts:  # that room resolves what it reads
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return words


def test_what_is_honoured_is_read_somewhere(root: Path) -> None:
    """A setting that no code reads is silently ignored, whatever the table says."""
    honoured = {name for name, row in TRAINING_ARGUMENTS.items() if row.status == "honoured"}
    unread = honoured - _READ_BY_SCRIPTS - _READ_IN_CONFIG - _words_of_the_code(root)
    assert unread == set()
