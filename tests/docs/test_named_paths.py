"""Every file, folder, class and function that the pages for contributors name exists."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a path in backticks may be relative to.
HOMES = ("", "src", "src/windlass", "tests", "tests/laws", "docs")
# Paths of a user's machine or of a run, and names of other programs.
NOT_OURS = {
    "../shared/data", "trainer_state.json", "training.png", "report.html", "metrics.jsonl", "run.json", "search.json",
    ".metadata", "site/",
}  # fmt: skip
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_FILE = re.compile(r".*\.(py|md|json|yaml|toml|svg)")


def paths_of(page: str) -> set[str]:
    """Words in backticks that are paths: with a slash, or with the ending of a file of the repository."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    words = {word for quoted in _IN_BACKTICKS.findall(text) for word in quoted.split()}
    return {w for w in words if _PATH.fullmatch(w) and ("/" in w or _FILE.fullmatch(w)) and w not in NOT_OURS}


@functools.cache
def exists(path: str) -> bool:
    if any((ROOT / home / path).exists() for home in HOMES):
        return True
    # In a sentence about a room its files are named alone; tables of objects name rooms once.
    alone = path.rstrip("/")
    return ("/" not in alone and _ends_one("src", alone)) or _ends_one("tests", alone)


@functools.cache
def _below(folder: str) -> str:
    """The paths below a folder, each after a slash and before the end of a line."""
    return "".join(f"/{path.relative_to(ROOT).as_posix()}\n" for path in (ROOT / folder).rglob("*"))


def _ends_one(folder: str, path: str) -> bool:
    return f"/{path}\n" in _below(folder)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "README.md"])
def test_every_named_path_exists(page: str) -> None:
    named = paths_of(page)
    assert page == "README.md" or len(named) > 20, "the pattern finds them"
    assert not sorted(path for path in named if not exists(path))


def test_a_path_that_does_not_exist_is_found() -> None:
    assert not exists("metrics/gather.py")
    assert exists("engine/loop.py")


_MODULE = re.compile(r"`([\w/]+\.py)`")


@pytest.mark.parametrize(
    "room", sorted(path.name for path in (ROOT / "src/windlass").iterdir() if path.is_dir())
)
def test_files_that_docstrings_and_comments_name_exist(room: str) -> None:
    """Files of other programs are named with their package first; `queue.py` is a file of a user's."""
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "src/windlass" / room).rglob("*.py")
        for name in _MODULE.findall(path.read_text("utf-8"))
    }
    others = ("llamafactory/", "deepspeed/", "axolotl/", "queue.py")
    assert not sorted(it for it in named if not it[1].startswith(others) and not exists(it[1]))


# --- names ------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")
# Of PyTorch, Python, pytest, the shell, devices, other packages or pages elsewhere; or put together of parts.
FOREIGN = {
    "COMET_API_KEY", "CUDA_DEVICE_ORDER", "FASTEST_FIRST", "Init._set_dtype", "PCI_BUS_ID", "cu126", "cu130",
    "datasets", "flock", "gcsfs", "global_step500", "huggingface_hub", "hypothesis", "make", "mypy", "ninja", "no-run",
    "pytest", "random_states_N.pkl", "register_for_auto_class", "ruff", "s3fs", "srun", "sysexits.h",
    "adapter_base_model_1", "eval_peak_memory_process_gib",
}  # fmt: skip


@functools.cache
def sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in (ROOT / folder).rglob("*.py")}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def names_of_file(path: Path) -> frozenset[str]:
    """What the code of a file defines, reads or calls, and the words that it writes as strings."""
    return frozenset(name for node in ast.walk(tree_of(path)) for name in _names_in(node))


@functools.cache
def files_by_word() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path, text in [*sources("src").items(), *sources("tests").items()]:
        for word in set(re.findall(r"\w+", text)):
            found.setdefault(word, []).append(path)
    return found


@functools.cache
def is_used(name: str) -> bool:
    """Whether the code has the name. Of the files only those are parsed whose text has it: parsing all takes 16 s."""
    return any(name in names_of_file(path) for path in files_by_word().get(name, ()))


def _names_in(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "name", "arg", "module"):
        if isinstance(value := getattr(node, field, None), str):
            yield from value.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
        yield from re.findall(r"\w+", node.value)


@functools.cache
def class_of(name: str) -> ast.ClassDef | None:
    head = re.compile(rf"^ *class {name}\b", re.MULTILINE)
    for path, text in sources("src").items():
        if head.search(text):
            found = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.ClassDef) and n.name == name]
            return found[0]
    return None


def has_member(owner: str, member: str) -> bool:
    """Whether the body of a class, or of a base of it, has the name."""
    body = class_of(owner)
    if body is None:
        return False
    if any(member in _names_in(part) for part in ast.walk(body)):
        return True
    return any(has_member(ast.unparse(base).split(".")[-1], member) for base in body.bases)


def is_known(name: str) -> bool:
    """Whether the code has this name; a class must have the member that is named with it."""
    first, *rest = name.split(".")
    if name in FOREIGN or hasattr(builtins, first):
        return True
    if rest and class_of(first):
        return has_member(first, rest[0])
    return all(is_used(part) for part in (first, *rest))


def names_of(page: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = [_NAME.fullmatch(quoted) for quoted in _IN_BACKTICKS.findall(text)]
    names = {match[1] for match in found if match}
    return {name for name in names if not _FILE.fullmatch(name)}


# These pages name what other libraries have.
OF_OTHERS = {"compatibility.md", "support.md", "moving.md"}
NAMING = ["CONTRIBUTING.md", "README.md"] + [
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.name not in OF_OTHERS
]


@pytest.mark.parametrize("page", NAMING)
def test_every_name_is_in_the_code(page: str) -> None:
    named = names_of(page)
    assert len(named) > 5 or page not in ("CONTRIBUTING.md", "docs/architecture.md"), "the pattern finds them"
    assert not sorted(name for name in named if not is_known(name) and not exists(name))


def test_a_name_that_is_gone_is_found() -> None:
    assert not is_known("CheckpointerOfLast" + "Year")
    assert not is_known("Loop.update_of_last_" + "year")
    assert is_known("Loop._update")
    assert is_known("Gang.over")
