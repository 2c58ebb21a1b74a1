"""Python blocks in the documentation run as printed: each page in one namespace, in an empty folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch_as, run_script

from windlass.core.optional import is_available

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGELOG = ROOT / "CHANGELOG.md"
BLOCK = re.compile(
    r"(?:^<!-- no-run: (?P<reason>.+?) -->\n+)?^```python[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    code: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("code")) + 1, m["code"], m["reason"])
        for m in BLOCK.finditer(text)
    ]


# Tutorials have files and commands: `test_tutorials.py` runs them.
IN_ONE_NAMESPACE = [page for page in PAGES if page.parent.name != "tutorials"]
RUNNABLE = [page for page in IN_ONE_NAMESPACE if any(b.reason is None for b in blocks(page))]
LEFT_OUT = [block for page in PAGES for block in blocks(page) if block.reason is not None]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem == "deepspeed")) for p in RUNNABLE],
    ids=lambda page: page.name,
)
def test_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.stem == "hub":
        request.getfixturevalue("hub")
        monkeypatch.setenv("HF_TOKEN", request.getfixturevalue("token"))
    if page.stem == "deepspeed":  # its engine keeps a process group to the end of the process
        if not is_available("deepspeed"):  # importing it would change the environment
            pytest.skip("needs DeepSpeed: pip install 'windlass-trainer[deepspeed]'")
        script = tmp_path / "page.py"
        script.write_text("\n".join(block.code for block in blocks(page) if block.reason is None))
        run_script(script, cwd=tmp_path)
        return
    namespace: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    for block in blocks(page):
        if block.reason is None:
            # Leading newlines make a traceback point at the line of the page.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            exec(code, namespace)


@pytest.mark.dist
def test_the_first_script_has_the_same_losses_in_two_processes(tmp_path: Path) -> None:
    first = next(block for block in blocks(ROOT / "README.md") if "Trainer" in block.code)
    losses, two = [], ["--num_processes", 2]
    for name, words in {"one": [], "two": two, "sharded": [*two, "--use_fsdp"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "first.py"
        script.write_text(first.code, "utf-8")
        if words:
            launch_as(*words, script, cwd=folder)
        else:
            run_script(script, cwd=folder)
        lines = (folder / "runs" / "first" / "metrics.jsonl").read_text("utf-8").splitlines()
        reports = [json.loads(line) for line in lines]
        losses.append([row[key] for row in reports for key in ("loss", "eval_loss") if key in row])
    assert len(losses[0]) == 3 * 40 // 10 + 4
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: block.name)
def test_the_block_is_left_out(block: Block) -> None:
    compile(block.code, block.name, "exec")
    pytest.skip(f"marked no-run: {block.reason}")


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    # The pages of the reference are made when the documentation is built, which checks the links to them.
    targets = [
        target for target in LINK.findall(page.read_text("utf-8")) if not target.startswith("reference/")
    ]
    lost = [target for target in targets if not (page.parent / target).exists()]
    assert not lost


def test_each_release_fits_on_one_screen() -> None:
    _, *releases = re.split(r"^## ", CHANGELOG.read_text("utf-8"), flags=re.MULTILINE)
    assert releases
    assert all(release.count("\n") <= 70 for release in releases)


def test_blocks_are_found() -> None:
    text = "a\n\n<!-- no-run: needs a network -->\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    found = [(m["reason"], m["code"]) for m in BLOCK.finditer(text)]
    assert found == [("needs a network", "x = 1\n"), (None, "y = 2\n")]
    assert len(RUNNABLE) >= 5
