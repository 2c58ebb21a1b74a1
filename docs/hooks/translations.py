"""Pages in other languages: code from the English page, a link to each language, and the direction of the script.

A translated page has the prose alone. `<!-- block 3 -->` stands for the third code block of the English page, so that
code is written, and run by the tests, once. Each heading has the anchor of the English one and, as `data-english`, the
digest of the English section that it translates: the tests compare it, so that no translation grows old unseen.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = {"en": "English", "ar": "العربية", "zh": "中文", "es": "Español"}
"""Folder of `docs/` (English has none) -> the language, in its own words."""

RIGHT_TO_LEFT = ("ar",)

_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"^<!-- block (\d+) -->$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,3} (?P<title>.+?)(?: \{#(?P<anchor>\S+) data-english=(?P<english>\w+)\})?$")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CHINESE = "\u2e80-\u9fff\uff00-\uffef"
_BREAK = re.compile(rf"(?<=[{_CHINESE}])\n[ ]*(?=[{_CHINESE}])")


@dataclass(frozen=True)
class Section:
    """A heading and the prose below it, up to the next one."""

    anchor: str
    prose: str
    english: str | None
    """Digest of the English section that this one translates; None on an English page."""

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with the text, and not with where its lines break."""
        return hashlib.sha256(" ".join(self.prose.split()).encode()).hexdigest()[:8]


def blocks(text: str) -> list[str]:
    """Return the fenced code blocks of an English page, with their fences."""
    return _BLOCK.findall(text)


def places(text: str) -> list[int]:
    """Return the numbers, from 1, of the blocks that a translated page refers to."""
    return [int(number) for number in _PLACE.findall(text)]


def sections(text: str) -> list[Section]:
    """Return the sections of a page without its code. The title of the page begins the first one."""
    from markdown.extensions.toc import slugify

    found: list[Section] = []
    for line in _COMMENT.sub("", _BLOCK.sub("", text)).splitlines():
        if heading := _HEADING.match(line):
            title = heading["title"]
            anchor = heading["anchor"] or slugify(title.replace("`", ""), "-")
            found.append(Section(anchor, title, heading["english"]))
        elif found:
            last = found[-1]
            found[-1] = Section(last.anchor, f"{last.prose}\n{line}", last.english)
    return found


def language_of(path: str) -> str:
    """Return the language of a page by its path below `docs/`."""
    folder, _, name = path.partition("/")
    return folder if name and folder in LANGUAGES else "en"


def siblings(path: str, docs: Path) -> dict[str, str]:
    """Return the page in each language that it exists in: language -> path below `docs/`."""
    english = path.removeprefix(f"{language_of(path)}/")
    paths = {name: english if name == "en" else f"{name}/{english}" for name in LANGUAGES}
    return {name: place for name, place in paths.items() if (docs / place).is_file()}


def with_code(text: str, english: str) -> str:
    """Return a translated page with the code blocks of the English one in their places.

    A line break between two Chinese characters goes: browsers show it as a space, and Chinese has none.
    """
    found = blocks(english)
    return _PLACE.sub(lambda place: found[int(place[1]) - 1], _BREAK.sub("", text))


# --- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put code into a translated page, and links to the other languages under the title of each that has any."""
    docs, path = Path(config.docs_dir), page.file.src_uri
    same = siblings(path, docs)
    if len(same) == 1:
        return markdown
    own = language_of(path)
    if own != "en":
        markdown = with_code(markdown, (docs / same["en"]).read_text("utf-8"))
    up = "" if own == "en" else "../"
    links = (f"[{LANGUAGES[name]}]({up}{place})" for name, place in same.items() if name != own)
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n{' · '.join(links)}\n{rest}"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the language of a translated page to browsers and screen readers, and turn it around if it is read so."""
    own = language_of(page.file.src_uri)
    output = output.replace('<html lang="en"', f'<html lang="{own}"', 1)
    return output.replace('<body dir="ltr"', '<body dir="rtl"', 1) if own in RIGHT_TO_LEFT else output
