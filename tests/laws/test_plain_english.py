"""Docstrings, comments and messages are written in plain technical English: certain phrases are not used."""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.laws.source import ROOT, modules

ROOMS = (
    "__main__", "accelerator", "assemble", "big_modeling", "callbacks", "checkpoint", "cli", "compat",
    "config", "core", "data", "data_loader", "dist", "engine", "finetuning", "hooks", "hub", "launchers", "local_sgd",
    "logging", "metrics", "optim", "optimizer", "parallelism_config", "precision", "recipes", "scheduler", "search",
    "state", "tracking", "text", "trainer", "transforms", "utils", "zero",
)  # fmt: skip

# What does not belong, and what to write instead. Only what has one meaning, so that no correct sentence is found.
PHRASES = {
    r"\banew\b": "again",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b)[a-z]": "is not a",
    r"\btells? whether\b": "shows if",
    r"\b[Gg]ives? whether\b": "Return True if",
    r"; gives ": "; return",
    r"\b[Ww]here there (is|are|was|were)\b": "if there",
    r"\bcomes? to stand\b": "is committed, is stored",
    r"\b(as it|still|it) stands\b": "is unchanged, exists",
    r"\bstands? (in )?for\b": "represents, replaces",
    r"\bstands? (here|there|still)\b": "exists here, makes no progress",
    r"\bbr(oke|oken|eaks) off\b": "was interrupted, failed",
    r"\b[Gg]iven up\b": "was dropped",
    r"\bmatters to nobody\b": "is ignored",
    r"\bshall be\b": "is to be",
    r"\bcut[- ]off\b": "was interrupted",
    r"\bin its turn\b": "one at a time, in order",
    r"\bgoes by\b": "uses, depends on",
    r"\b[Ss]ees? to it\b": "ensures",
    r"\bas (it|they) (was|were) (told|asked)\b": "as requested",
    r"\bstood still\b": "stalled, made no progress",
    r"\b([Ww]hoever|[Ss]omebody|[Ss]trangers?)\b": "the program, machine or process that is meant",
    r"\b[Nn]obody\b": "no process, no caller, no thread",
    r"\b(is|are|was|were|been) told\b": "gets, receives, reads",
    r"\bspeaks? (of|for|to)\b": "mentions, represents, communicates with",
    r"\b(befalls?|[Dd]ooms?|fates?)\b": "happens to, fault, outcome",
    r"^Those (that|of|which)\b": "the noun that is meant",
    r"\b[Ss]ay (where|whether|how)\b": "warn if, describe how",
}


COMPILED = {re.compile(pattern, re.MULTILINE): plain for pattern, plain in PHRASES.items()}
# Nearly all files have none: one search for those that begin with a word takes a sixth of the time of one for each.
_OF_WORDS = [pattern.removeprefix(r"\b") for pattern in PHRASES if pattern.startswith(r"\b")]
_ANY_OF_WORDS = re.compile(rf"\b(?:{'|'.join(_OF_WORDS)})")
_OTHERS = {each: plain for each, plain in COMPILED.items() if not each.pattern.startswith(r"\b")}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and string literal of `source`; parts of an f-string are texts of their own. What
    follows a `#` inside a string counts as a comment: to find where comments are takes as long as all the rest.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line[line.index("#") :]


def riddles(source: str) -> list[str]:
    """Each phrase of `source` that does not belong, with its line and a plain one."""
    lines = [(number, re.sub(r"\s+", " ", text)) for number, text in texts(source)]
    whole = "\n".join(text for _, text in lines)  # no phrase has a line's end in it
    starts = list(itertools.accumulate((len(text) + 1 for _, text in lines), initial=0))
    return [
        f"{lines[bisect.bisect(starts, found.start()) - 1][0]}: {found.group()!r}: write {plain!r}"
        for pattern, plain in (COMPILED if _ANY_OF_WORDS.search(whole) else _OTHERS).items()
        for found in pattern.finditer(whole)
    ]


def _of_rooms() -> list[Path]:
    return [module.path for module in modules() if module.room in ROOMS]


def test_rooms_are_in_plain_english() -> None:
    found = [f"{path}:{riddle}" for path in _of_rooms() for riddle in riddles(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_tests_are_in_plain_english() -> None:
    files = [path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path}:{riddle}"
        for path in files
        if path != Path(__file__)
        for riddle in riddles(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_pages_are_in_plain_english() -> None:
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [
        f"{page.name}:{number}: {match.group()!r}: write {plain!r}"
        for page in pages
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        for pattern, plain in PHRASES.items()
        for match in re.finditer(pattern, line)
    ]
    assert not found, "\n".join(found)


def test_every_room_is_looked_at() -> None:
    assert {module.room for module in modules() if module.path in _of_rooms()} == set(ROOMS)


def test_the_law_sees_docstrings_comments_and_messages() -> None:
    source = '"""It is written\n    anew."""\nx = f"{x} is no folder"  # it still stands\n'
    assert sorted(riddle.split(":")[0] for riddle in riddles(source)) == ["1", "3", "3"]
    assert not riddles('"""It is no longer there."""\nanew = "again"  # a name is not a text\n')
