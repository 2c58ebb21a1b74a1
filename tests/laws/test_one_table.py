"""What holds for a setting is declared in one place: nothing else keeps a list of settings, or spells their words.

The arguments are declared in `config/sections/`, the settings of how training is spread in `config/parallel/rows_*.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import Module, modules, nodes

from windlass.config.arguments import TrainingArguments
from windlass.config.parallel import rows_training
from windlass.config.sections.setting import rules_of

ARGUMENTS = set(rules_of(TrainingArguments))
WORDS = {
    word.lower()
    for words in (rows_training.SHARDING_WORDS, rows_training.PREFETCH_WORDS, rows_training.WRAPPING.values(),
                  rows_training.STATES.values())
    for word in words
}  # fmt: skip
ROOMS = ("config", "assemble", "recipes", "cli")
DECLARATIONS = ("windlass.config.sections.", "windlass.config.parallel.rows_")

LISTS = {
    "windlass.config.arguments": "which of them may differ from those of an earlier process without a warning",
    "windlass.cli.print_config": "which of them a printed recipe has even at their defaults",
    "windlass.cli.dry_run": "what a rehearsal does otherwise than the run",
    "windlass.recipes.tiny": "what the tiny form of a recipe does otherwise than the recipe",
    "windlass.config.deepspeed": "keys of DeepSpeed's configuration, some of which are spelled as arguments are",
    "windlass.config.parallel.sources": "fields that hold several settings, and so belong to none",
    "windlass.config.parallel.keys": "names of families, some of which are spelled as arguments are",
}
SPELLINGS = {
    "windlass.cli.config_command": "the choices that a question offers",
    "windlass.config.parallel.parallel_plan": "what the words mean",
    "windlass.config.parallel.xla_checks": "what the words mean under PyTorch/XLA",
}


def _literals(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.Dict):
        return list(node.keys)
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List | ast.Set) else []


def lists_arguments(tree: ast.Module) -> bool:
    """Whether a file has a literal with three names of arguments or more, also as words of one text."""
    for node in nodes(tree):
        texts = [item.value for item in _literals(node) if isinstance(item, ast.Constant)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = node.value.split() if "\n" in node.value and "." not in node.value else []
        if len(ARGUMENTS.intersection(text for text in texts if isinstance(text, str))) >= 3:
            return True
    return False


def spells(tree: ast.Module) -> bool:
    """Whether a file has a text that is a word of sharding."""
    texts = (node.value for node in nodes(tree) if isinstance(node, ast.Constant))
    return any(isinstance(text, str) and text.lower() in WORDS for text in texts)


def _others() -> Iterator[Module]:
    return (m for m in modules() if m.room in ROOMS and not m.name.startswith(DECLARATIONS))


def test_arguments_are_listed_where_they_are_declared() -> None:
    assert {module.name for module in _others() if lists_arguments(module.tree)} == LISTS.keys()


def test_words_are_spelled_where_they_are_declared() -> None:
    assert {module.name for module in _others() if spells(module.tree)} == SPELLINGS.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("A = {'bf16': 1, 'seed': 2, 'optim': 3}", True),
        ("A = ('bf16', 'seed', 'optim')", True),
        ("A = '''\\nbf16 seed\\noptim\\n'''", True),
        ("A = ('bf16', 'seed')", False),
    ],
)
def test_the_law_sees_lists(source: str, found: bool) -> None:
    assert lists_arguments(ast.parse(source)) is found


def test_the_law_sees_words() -> None:
    assert spells(ast.parse("A = 'FULL_SHARD'"))
    assert not spells(ast.parse("A = 'full'"))
