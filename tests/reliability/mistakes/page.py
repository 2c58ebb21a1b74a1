"""The tables of docs/mistakes.md: `python -m tests.reliability.mistakes.page` writes them."""

from __future__ import annotations

from collections.abc import Iterable

from tests.laws.source import ROOT
from tests.reliability.mistakes.in_commands import COMMANDS
from tests.reliability.mistakes.in_ranks import RANKS
from tests.reliability.mistakes.in_scripts import SCRIPTS
from tests.reliability.mistakes.in_tuning import TUNING
from tests.reliability.mistakes.mistake import Mistake

PAGE = "docs/mistakes.md"
BEGIN, END = "<!-- mistakes: begin -->\n", "<!-- mistakes: end -->\n"
SETS = {
    "In scripts": SCRIPTS,
    "In fine-tuning": TUNING,
    "In several processes": RANKS,
    "In recipes and commands": COMMANDS,
}


def tables() -> str:
    """The tables, between their marks."""
    found = "\n".join(f"### {title}\n\n{_table(mistakes)}" for title, mistakes in SETS.items())
    count = sum(map(len, SETS.values()))
    return f"{BEGIN}\n{count} mistakes, all answered so.\n\n{found}\n{END}"


def _table(mistakes: Iterable[Mistake]) -> str:
    lines = ["| Mistake | Words of the answer |", "|---|---|"]
    for mistake in mistakes:
        words = [word if isinstance(word, str) else word[0] for word in mistake.words]
        shown = ", ".join(f"`{word.strip().replace('|', chr(92) + '|')}`" for word in words)
        lines.append(f"| {mistake.name}{' (a warning)' if mistake.warns else ''} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page = ROOT / PAGE
    text = page.read_text("utf-8")
    page.write_text(text[: text.index(BEGIN)] + tables() + text[text.index(END) + len(END) :], "utf-8")


if __name__ == "__main__":
    main()
