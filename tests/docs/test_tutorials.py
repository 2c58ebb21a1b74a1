"""Tutorials work as printed: their files are written, their commands run in order, and what they print is compared.

Numbers in the output of a tutorial are those of one machine, since processors round sums in different orders: only that
there is a number is compared. So which lines are printed must not depend on rounding: a run that a metric ends has more
epochs than it can need. Commands without operators of the shell, except `|| true`, run in a fork of a process
that has imported everything; others run in a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.dist.launch import end_of, launch_as

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- no-run: (?P<reason>.+?) -->\n+)?^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# Of the first line of a command: what a tutorial's reader has done, or does elsewhere.
_DONE_BEFORE = re.compile(r"(pip|make) ")
_FOR_ONE_SHELL = re.compile(r"[$&;]")  # variables, and jobs that run beside others
_FOR_A_SHELL = re.compile(r"[$&|<>;*]|^(?!python |windlass )")
_NUMBER = re.compile(r"\d[\d.,:e+-]*")


@dataclass(frozen=True)
class Block:
    kind: str
    title: str | None
    text: str
    reason: str | None


def blocks(text: str) -> list[Block]:
    return [Block(m["kind"], m["title"], m["text"], m["reason"]) for m in _BLOCK.finditer(text)]


def commands(script: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comments and without what is installed before."""
    for line in script.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#") and not _DONE_BEFORE.match(line):
            yield line


def run(script: str, folder: Path) -> str:
    """Run the commands of one block in `folder`; return what they print."""
    lines = list(commands(script))
    if any(_FOR_ONE_SHELL.search(line) for line in lines):
        return in_a_shell("\n".join(lines), folder)
    return "".join(_run_one(line, folder) for line in lines)


def _run_one(line: str, folder: Path) -> str:
    command = line.removesuffix(" || true")
    if _FOR_A_SHELL.search(command):
        return in_a_shell(line, folder)
    program, first, *rest = shlex.split(command)
    if first == "launch" and "--print" not in rest:
        return launch_as(*(folder / word if word.endswith(".py") else word for word in rest), cwd=folder)
    words = [folder / first] if program == "python" else ["windlass", first]
    code, printed = end_of(*words, *rest, cwd=folder)
    assert command != line or not code, f"{line}: exit code {code}\n{printed[-6000:]}"
    return printed


def in_a_shell(script: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert not done.returncode, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def missing(expected: str, printed: str) -> list[str]:
    """Return the lines of `expected` that were not printed, whatever their numbers are."""
    found = _shape(printed)
    return [line for line in expected.splitlines() if line.strip() and _shape(line) not in found]


def _shape(text: str) -> str:
    return re.sub(r"\s+", " ", _NUMBER.sub("0", text)).strip()


@pytest.mark.dist
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in ("moving", "two-machines"))) for p in TUTORIALS],
    ids=lambda page: page.stem,
)
def test_the_tutorial_works(page: Path, tmp_path: Path) -> None:
    parts = blocks(page.read_text("utf-8"))
    for part in parts:
        if part.kind != "bash" and part.title and part.title != "Prints":
            (tmp_path / part.title).write_text(part.text, "utf-8")
    printed = ""
    for part in parts:
        if part.kind == "bash" and part.reason is None:
            printed = run(part.text, tmp_path)
        elif part.title == "Prints":
            assert not missing(part.text, printed), printed[-3000:]


def test_what_is_not_printed_is_found() -> None:
    assert not missing("loss 0.25\n", "step 3  loss 1.5e-05\n")
    assert missing("loss 0.25\nsaved\n", "step 3  loss 0.25\n") == ["saved"]
    assert [
        b.title for b in blocks('```python title="a.py"\nx\n```\n<!-- no-run: why -->\n```bash\ny\n```\n')
    ] == ["a.py", None]
    assert list(commands("pip install x\n# a comment\nls \\\n  -l\n")) == ["ls    -l"]
