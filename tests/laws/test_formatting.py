"""Law: the formatter decides how code is laid out, and comments precede the code that they explain."""

from __future__ import annotations

import re

from tests.laws.source import modules

# Tables of names, which would fill a screen with one name per line. The number may only become smaller.
SKIPPED = 59
_SKIP = re.compile(r"# fmt: (skip|off)")
# The formatter moves a comment behind a bracket that it has split: the comment no longer precedes its code.
_TORN = re.compile(r"^\s*\)(:| as \w+:)?  # (?!fmt: |type: )", re.MULTILINE)


def test_the_formatter_is_skipped_for_few_tables() -> None:
    found = [module.where for module in modules() for _ in _SKIP.findall(module.path.read_text("utf-8"))]
    assert len(found) <= SKIPPED, f"{len(found)} statements skip the formatter:\n" + "\n".join(found)


def test_no_comment_follows_a_closing_bracket() -> None:
    found = [
        f"{module.where}: {torn.group().strip()}"
        for module in modules()
        for torn in _TORN.finditer(module.path.read_text("utf-8"))
    ]
    assert not found, "write the comment before the statement:\n" + "\n".join(found)


def test_the_law_sees_torn_comments() -> None:
    assert _TORN.search("x = f(\n    y\n)  # why\n")
    assert not _TORN.search("x = f(\n    y\n)  # type: ignore[arg-type]\n# why\nx = f(y)\n")
