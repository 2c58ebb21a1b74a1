"""Each translated page has the sections, the code, the names and the links of the English page as it is now."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TRANSLATED = sorted(
    str(page.relative_to(DOCS)) for folder in ("ar", "zh", "es") for page in (DOCS / folder).glob("*.md")
)

_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)]+)\)")


def _hook() -> ModuleType:
    path = DOCS / "hooks" / "translations.py"
    spec = importlib.util.spec_from_file_location("docs_translations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HOOK = _hook()


def texts(path: str) -> tuple[str, str]:
    """Return the translated page and the English one."""
    english = HOOK.siblings(path, DOCS)["en"]
    return (DOCS / path).read_text("utf-8"), (DOCS / english).read_text("utf-8")


def links(prose: str, page: str) -> set[str]:
    """Return what a section links to, in English: pages below `docs/` with their anchors, and addresses."""
    found = set()
    for target in _LINK.findall(prose):
        path = target if ":" in target else os.path.normpath(os.path.join(os.path.dirname(page), target))
        found.add(path.removeprefix(f"{HOOK.language_of(page)}/") if "/" in page else path)
    return found


def test_the_pages_that_most_readers_start_from_are_translated() -> None:
    pages = ("quickstart", "training", "fine-tuning")
    assert set(TRANSLATED) == {f"{language}/{page}.md" for language in ("ar", "zh", "es") for page in pages}


@pytest.mark.parametrize("path", TRANSLATED)
def test_a_translated_page_says_what_the_english_one_says_today(path: str) -> None:
    translated, english = (HOOK.sections(text) for text in texts(path))
    assert [section.anchor for section in translated] == [section.anchor for section in english]
    old = [
        f"#{there.anchor}: translate the section again, then write data-english={there.digest}"
        for here, there in zip(translated, english, strict=True)
        if here.english != there.digest
    ]
    assert not old, f"docs/{path} translates an older text:\n" + "\n".join(old)


@pytest.mark.parametrize("path", TRANSLATED)
def test_a_translated_page_has_every_name_link_and_row(path: str) -> None:
    source = HOOK.siblings(path, DOCS)["en"]
    translated, english = (HOOK.sections(text) for text in texts(path))
    for here, there in zip(translated, english, strict=True):
        where = f"docs/{path}#{here.anchor}"
        assert set(_SPAN.findall(here.prose)) == set(_SPAN.findall(there.prose)), where
        assert links(here.prose, path) == links(there.prose, source), where
        for mark in ("|", "- "):
            rows = [sum(line.startswith(mark) for line in part.prose.splitlines()) for part in (here, there)]
            assert rows[0] == rows[1], f"{where}: lines that begin with {mark!r}"


@pytest.mark.parametrize("path", TRANSLATED)
def test_a_translated_page_shows_each_block_of_code_once_and_has_none_of_its_own(path: str) -> None:
    translated, english = texts(path)
    assert not HOOK.blocks(translated)
    assert HOOK.places(translated) == list(range(1, len(HOOK.blocks(english)) + 1))
    assert HOOK.blocks(HOOK.with_code(translated, english)) == HOOK.blocks(english)


def test_pages_link_to_their_languages_and_arabic_reads_from_the_right() -> None:
    config = SimpleNamespace(docs_dir=str(DOCS))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="ar/quickstart.md"))
    text = HOOK.on_page_markdown((DOCS / "ar" / "quickstart.md").read_text("utf-8"), page, config, None)
    assert (
        "[English](../quickstart.md) · [中文](../zh/quickstart.md) · [Español](../es/quickstart.md)" in text
    )
    assert "```bash\npip install" in text
    html = '<html lang="en" class="no-js"><body dir="ltr" data-x>'
    assert HOOK.on_post_page(html, page, config) == '<html lang="ar" class="no-js"><body dir="rtl" data-x>'
    page.file.src_uri = "quickstart.md"
    text = HOOK.on_page_markdown((DOCS / "quickstart.md").read_text("utf-8"), page, config, None)
    assert "[العربية](ar/quickstart.md) · [中文](zh/quickstart.md) · [Español](es/quickstart.md)" in text
    assert HOOK.on_post_page(html, page, config) == html
    page.file.src_uri = "losses.md"
    assert HOOK.on_page_markdown("# Losses", page, config, None) == "# Losses"


def test_lines_of_chinese_are_joined_without_a_space() -> None:
    text = "一行\n和另一行，\n  以及 `name`\n\n段落\n<!-- block 1 -->\n"
    assert HOOK.with_code(text, "```bash\nls\n```") == "一行和另一行，以及 `name`\n\n段落\n```bash\nls\n```\n"


def test_a_changed_english_section_changes_its_digest_and_its_line_breaks_do_not() -> None:
    (before,) = HOOK.sections("# Title\n\nTwo words and\na third.\n")
    (wrapped,) = HOOK.sections("# Title\n\nTwo words\nand a third.\n\n```bash\ncode\n```\n")
    (changed,) = HOOK.sections("# Title\n\nTwo words and a fourth.\n")
    assert before.digest == wrapped.digest != changed.digest
