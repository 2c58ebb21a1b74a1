"""The recipes that are installed with the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.core.errors import ConfigError, Problem, nearest
from windlass.core.locations import at_home

FOLDER = Path(__file__).parent / "built_in"
DEFAULT = "python-docs"
# Rows for the tiny form of a recipe: texts with a target and a label, conversations, and preferences.
ROWS, CHAT = FOLDER / "tiny" / "rows.jsonl", FOLDER / "tiny" / "chat.jsonl"
PREFERENCES = FOLDER / "tiny" / "preferences.jsonl"
ENDINGS = (".yaml", ".yml")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_recipe(word: str) -> bool:
    """Return True for the name of a YAML file, or of a built-in recipe."""
    return word.endswith(ENDINGS) or word in names()


def recipe_path(word: str | Path) -> Path:
    """Return the file of a recipe: the one with this name, else the built-in recipe. Raises ConfigError if there is
    neither.
    """
    path = at_home(word)
    # A name with the ending is a file, also if there is none: the error names it, and no built-in recipe.
    return path if os.path.isfile(path) or path.suffix in ENDINGS else built_in(str(word))


def built_in(name: str) -> Path:
    """Return the file of a built-in recipe. Raises ConfigError if there is none with this name."""
    known = names()
    if name in known:
        return FOLDER / f"{name}.yaml"
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else "`windlass recipes` lists the built-in ones"
    raise ConfigError(Problem("recipe", name, f"there is no such recipe; {fix}"))


def described(name: str) -> tuple[str, str]:
    """Return what a recipe trains and what it needs: the first two lines of its file."""
    first, second = built_in(name).read_text(encoding="utf-8").splitlines()[:2]
    return first.removeprefix("# "), second.removeprefix("# Needs: ")
