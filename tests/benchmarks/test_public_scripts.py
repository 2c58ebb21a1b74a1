"""The table of public scripts: recipes are checked, scripts are run by both libraries, and what fails is said."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from beside import SIZE

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, SIZE)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])))
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 2]))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
raise_at_the_end
"""


@pytest.fixture(scope="module")
def command() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("public_scripts")
    sys.path.remove(str(FOLDER))
    for name in ("public_scripts", "common"):
        del sys.modules[name]


def put(folder: Path, path: str, text: str) -> str:
    """Write a file of the repository `some/one` at commit `abc`, and return its sha256."""
    file = folder / "some/one" / "abc" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def recipe(command: ModuleType, folder: Path, **changes: Any) -> Any:
    sums = {
        "a/train.py": put(folder, "a/train.py", SCRIPT),
        "a/beside.py": put(folder, "a/beside.py", "SIZE = 3"),
    }
    patch = (("raise_at_the_end", ""),)
    given = {"arguments": "0.1", "figures": "forward", "patch": patch, "why": "it ends"}
    return command.Recipe("one", "some/one", "abc", sums, **{**given, **changes})


def test_the_recipes_are_complete(command: ModuleType) -> None:
    recipes = command.load(command.RECIPES)
    assert len(recipes) >= 25
    for it in recipes:
        assert all(re.fullmatch("[0-9a-f]{64}", value) for value in it.sha256.values()), it.name
        assert re.fullmatch(r"[0-9a-f]{40}|[\w-]+==[\d.]+", it.version), it.name
        assert it.figures in ("log", "forward"), it.name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a, repository: r, version: v}", "sha256"),
        ("- {name: a, repository: r, version: v, sha256: {a: b}, nmae: c}", "nmae"),
        ("- {name: a, repository: r, version: v, sha256: {a: b}, patch: [[x, y]]}", "has a reason"),
        ("- &a {name: a, repository: r, version: v, sha256: {a: b}}\n- *a", "several recipes are named a"),
    ],
)
def test_a_recipe_with_a_fault_is_named(command: ModuleType, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "recipes.yaml").write_text(text)
    with pytest.raises(SystemExit, match=words):
        command.load(tmp_path / "recipes.yaml")


@pytest.mark.slow
def test_both_libraries_run_a_script_and_their_losses_are_compared(
    command: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "standins").mkdir()
    it = recipe(command, tmp_path)
    result = command.measure(it, tmp_path, tmp_path / "standins")
    losses = [result[name]["losses"] for name in ("original", "windlass")]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert losses[0][2][1] < losses[0][0][1]
    assert min(result[name]["seconds"] for name in ("original", "windlass")) > 0
    line = command.row(it, result)
    assert line[:5] == ["some/one `a/train.py` (abc)", "it ends", "yes", "3", "none, same bits"]
    figures = {"date": "today", "machine": "a machine", "versions": {"torch": "2"}}
    page = command.render([it], {"one": result}, figures)
    assert page.startswith(
        "1 scripts: 1 run with the original library on this machine, 1 of these with Windlass, 1 of"
    )


def test_a_script_that_fails_is_reported_with_its_error(command: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "standins").mkdir()
    it = recipe(command, tmp_path, arguments="x", patch=(), why="")
    outcome = command.run(it, tmp_path, tmp_path / "standins", [sys.executable])
    assert outcome.failure == "ValueError: could not convert string to float: 'x'"
    ran = {"failure": "", "losses": [["loss", 1.0]], "seconds": 2.0}
    failed = {"failure": outcome.failure, "losses": [], "seconds": 1.0}
    ours = command.row(it, {"original": ran, "windlass": failed})
    theirs = command.row(it, {"original": failed, "windlass": ran})
    assert ours[2] == "no: ValueError: could not convert string to float: 'x'"
    assert theirs[2].startswith("the original fails: ValueError")
    assert theirs[2].endswith("works with Windlass")


def test_rows_without_a_result_stay_on_the_page(command: ModuleType, tmp_path: Path) -> None:
    one, two = recipe(command, tmp_path), command.Recipe("two", "some/one", "one==1.0", {"b.py": "0"})
    ran = {"failure": "", "losses": [["loss", 1.0]], "seconds": 2.0}
    failed = {"failure": "ValueError: x|y", "losses": [], "seconds": 1.0}
    figures = {"date": "today", "machine": "a machine", "versions": {"torch": "2"}}
    first = command.render([one, two], {"one": {"original": ran, "windlass": failed}}, figures)
    assert first.startswith("2 scripts: 1 run with the original library on this machine, 0 of these")
    page = f"<!-- begin: public scripts -->\n{first}\n<!-- end: public scripts -->\n"
    second = command.render([one, two], {"two": {"original": ran, "windlass": ran}}, figures, page)
    assert second.startswith("2 scripts: 2 run with the original library on this machine, 1 of these")
    lines = first.splitlines()
    assert [line in second for line in lines if line.startswith("| some/one")] == [True, False]
    assert "| no: ValueError: x/y |" in second


def test_an_absent_file_or_package_is_reported(command: ModuleType, tmp_path: Path) -> None:
    it = recipe(command, tmp_path, needs=("no_such_package",))
    assert command.measure(it, tmp_path, tmp_path) == {"lacking": "not installed: no_such_package"}
    (tmp_path / "some/one/abc/a/beside.py").unlink()
    result = command.measure(it, tmp_path, tmp_path)
    assert result == {"lacking": "absent: https://github.com/some/one/raw/abc/a/beside.py"}
    assert command.row(it, result)[2] == f"not run: {result['lacking']}"
    released = command.Recipe("two", "some/one", "one==1.0", {"b.py": "0"})
    assert command.lacking(released, tmp_path) == "absent: pip download --no-deps one==1.0, file b.py"


def test_a_file_with_another_sum_is_an_error_with_both(command: ModuleType, tmp_path: Path) -> None:
    it = recipe(command, tmp_path)
    changed = put(tmp_path, "a/beside.py", "SIZE = 4")
    with pytest.raises(SystemExit) as error:
        command.lacking(it, tmp_path)
    assert changed in str(error.value)
    assert it.sha256["a/beside.py"] in str(error.value)


def test_a_patch_that_does_not_apply_is_an_error(command: ModuleType, tmp_path: Path) -> None:
    it = recipe(command, tmp_path, patch=(("not there", ""),))
    with pytest.raises(SystemExit, match="there is no 'not there' in the script"):
        command.patched(it, SCRIPT)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([("loss", 1.0)], [("loss", 1.0)], "none, same bits"),
        ([("loss", 1.0), ("loss", 2.0)], [("loss", 1.0), ("loss", 2.25)], "loss: 2.5e-01"),
        (
            [("loss", 1.0), ("eval_loss", 2.0)],
            [("loss", 1.0), ("eval_loss", 2.25)],
            "eval_loss: 2.5e-01; loss: none, same bits",
        ),
        ([("loss", 1.0)], [("loss", 1.0), ("eval_loss", 1.0)], "1 and 2 losses"),
        ([], [], "no losses"),
    ],
)
def test_the_largest_difference(command: ModuleType, one: Any, other: Any, words: str) -> None:
    assert command.difference(one, other) == words


def test_the_page_has_the_section(command: ModuleType) -> None:
    text = (FOLDER.parent / "docs" / "compatibility.md").read_text("utf-8")
    assert "<!-- begin: public scripts -->" in text
    assert "<!-- end: public scripts -->" in text


@pytest.fixture
def compared(command: ModuleType) -> Iterator[ModuleType]:
    yield importlib.import_module("compared_scripts")
    del sys.modules["compared_scripts"]


def test_a_comparison_is_a_line_and_what_is_absent_is_named(
    command: ModuleType, compared: ModuleType, tmp_path: Path
) -> None:
    one, figures = recipe(command, tmp_path), {"date": "today", "machine": "this", "versions": {}}
    run = {"updates": [{}, {}], "seconds": 2.0, "set_and_not_read": ["packing"]}
    found = {
        "own": run, "windlass": {**run, "seconds": 1.0, "set_and_not_read": []}, "from_update": {"loss": 2},
        "first_difference": "from update 2",
    }  # fmt: skip
    text = compared.render([one], {"one": found}, figures, 2)
    line = next(line for line in text.splitlines() if "a/train.py" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == [
        "2", "same", "same", "from 2", "same", "same", "0.50", "from update 2", "own: packing",
    ]  # fmt: skip
    absent = compared.render([one], {"one": {"lacking": "absent"}}, figures, 2)
    assert "Not compared, since files or packages were absent: some/one `a/train.py`." in absent
    assert "with Windlass: Error" in compared.row(one, {"failure": "with Windlass: Error"})[1]


@pytest.mark.slow
def test_a_script_is_compared(command: ModuleType, compared: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "standins").mkdir()
    found = compared.compare(recipe(command, tmp_path), tmp_path, tmp_path / "standins", 2)
    assert found["first_difference"] == "same bits in every update"
    assert compared.row(recipe(command, tmp_path), found)[2:7] == ["same"] * 5
