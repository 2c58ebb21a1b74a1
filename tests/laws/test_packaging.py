"""What is installed is what was meant: one version, pinned requirements, extras that the error messages name."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

from tests.laws.source import ROOT

import windlass
from windlass.core.optional import DISTRIBUTION, EXTRAS

CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = CONFIG["project"]


def _name(requirement: str) -> str:
    """The distribution that a requirement or a pin names, in its normal form."""
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {_name(line): line.partition("==")[2] for line in lines if line and not line.startswith("#")}


def test_one_version() -> None:
    assert PROJECT["version"] == windlass.__version__


def test_the_distribution_has_its_name_everywhere() -> None:
    """`windlass` on the package index is another project: no page, message or extra may ask for it."""
    own = re.compile(r"\bwindlass\[\w|pip (?:install|download|wheel)[^`\n#]*[ \"']windlass(?![\w-])")
    assert own.search('pip install "windlass[hf]"')
    assert own.search("pip install -U windlass\n")
    assert not own.search('pip install "windlass-trainer[hf]"  # then windlass train')
    assert PROJECT["name"] == DISTRIBUTION
    rooms = [ROOT / name for name in ("src", "docs", "tests", "recipes", "examples", "benchmarks")]
    pages = [*ROOT.glob("*.*"), ROOT / "Makefile", *(path for room in rooms for path in room.rglob("*"))]
    texts = [p for p in pages if p.suffix in (".py", ".md", ".toml", ".yaml", "") and p.is_file()]
    assert len(texts) > 500
    assert not [str(p) for p in texts if p != Path(__file__) and own.search(p.read_text("utf-8"))]


def test_an_extra_that_names_others_names_those_of_this_distribution() -> None:
    extras = PROJECT["optional-dependencies"]
    named = re.findall(rf"'{DISTRIBUTION}\[([\w,-]+)\]'", str(extras))
    assert len(named) == 4
    assert {name for names in named for name in names.split(",")} <= extras.keys()


def test_the_page_on_installation_has_every_extra() -> None:
    page = (ROOT / "docs" / "installation.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (.+) \|$", page, re.MULTILINE)
    extras = {
        name: {
            item for found in wanted for item in found.removeprefix(f"{DISTRIBUTION}[").rstrip("]").split(",")
        }
        if any(found.startswith(DISTRIBUTION) for found in wanted)
        else set(wanted)
        for name, wanted in PROJECT["optional-dependencies"].items()
        if name not in ("test", "lint", "docs", "bench")
    }
    assert {name: set(re.findall(r"`([^`]+)`", told)) for name, told in rows} == extras
    assert PROJECT["requires-python"] == ">=3.11"
    assert "torch>=2.9" in PROJECT["dependencies"]
    assert "needs Python 3.11 or newer and PyTorch 2.9 or newer" in page


def test_every_direct_requirement_is_pinned() -> None:
    asked = {_name(r) for r in PROJECT["dependencies"]}
    asked |= {_name(r) for extra in PROJECT["optional-dependencies"].values() for r in extra}
    pins = _pins()
    assert asked - {DISTRIBUTION} <= pins.keys()
    assert all(pins.values())


def test_an_extra_brings_what_its_error_message_promises() -> None:
    distributions = {"rouge_score": "rouge-score", "sklearn": "scikit-learn", "PIL": "pillow"}
    for package, extra in EXTRAS.items():
        name = distributions.get(package, _name(package))
        assert name in {_name(r) for r in PROJECT["optional-dependencies"][extra]}


def test_make_never_installs_unpinned() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    recipes = [line.strip() for line in text.splitlines() if line.startswith("\t")]
    assert any(line.startswith("$(PIP)") for line in recipes)
    assert not [line for line in recipes if re.search(r"\bpip\b.*\binstall\b", line)]
    assert re.search(r"^PIP := .*pip install .*-c \$\(PINS\)$", text, re.MULTILINE)
    assert re.search(
        r"^PINS := \$\(if \$\(TORCH\),\$\(VENV\)/constraints\.txt,constraints\.txt\)$", text, re.MULTILINE
    )


def test_make_pins_the_torch_that_is_asked_for() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    (rule,) = re.findall(r"sed '(s/[^']+)' constraints\.txt > \$@", text)
    _, found, replaced, _ = rule.split("/")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    changed = re.sub(found, replaced.replace("$(TORCH)", "9.9"), pins, flags=re.MULTILINE)
    assert "\ntorch==9.9\n" in changed
    assert len(set(changed.splitlines()) ^ set(pins.splitlines())) == 2


def test_the_command_exists() -> None:
    module, _, function = PROJECT["scripts"]["windlass"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
