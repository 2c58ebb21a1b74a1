"""The wheel holds the package, and works in an environment that has no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.test_docs import blocks
from tests.laws.source import PACKAGE, ROOT

import windlass

TINY = ["model.config.num_hidden_layers=1", "tokenizer.train.vocab_size=300", "sample.max_new_tokens=2"]
SHORT = ["training.max_steps=2", "training.save_steps=2", "training.eval_strategy=no", "data.eval_fraction=0"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the command of `make wheel`, without pip's download of the build backend."""
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = ["-m", "hatchling", "build", "-t", "wheel", "-d"]
    assert f"$(BIN)/python {' '.join(command)} dist" in (ROOT / "Makefile").read_text("utf-8")
    subprocess.run([sys.executable, *command, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.iterdir()
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"windlass_trainer-{windlass.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    files = (path for kind in ("*.py", "*.pyi", "*.schema.json") for path in PACKAGE.rglob(kind))
    sources = {f"windlass/{path.relative_to(PACKAGE).as_posix()}" for path in files}
    recipes = {
        f"windlass/{path.relative_to(PACKAGE).as_posix()}"
        for path in (PACKAGE / "recipes" / "built_in").rglob("*.*")
    }
    assert "windlass/recipes/built_in/python-docs.yaml" in recipes
    assets = {
        f"windlass/callbacks/assets/{path.name}" for path in (PACKAGE / "callbacks" / "assets").iterdir()
    }
    assert "windlass/callbacks/assets/uplot.LICENSE" in assets
    data = {"windlass/py.typed", "windlass/cli/status.schema.json"} | recipes | assets
    assert len(sources) > 500
    assert sources | data <= names
    others = names - sources - data
    told = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert others == {f"windlass_trainer-{windlass.__version__}.dist-info/{name}" for name in told}
    assert "windlass = windlass.cli.main:main" in entry


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a program of an environment with the wheel in an empty folder; return what it prints.

    The other packages are those of this environment. A `.pth` file adds their folders behind the wheel's; an editable
    installation in them stays out, since Python does not read the `.pth` files of folders that a `.pth` file adds.
    """
    root = tmp_path_factory.mktemp("installed")
    place, folder = root / "environment", root / "work"
    folder.mkdir()
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True, capture_output=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(program: str, *words: str | Path) -> str:
        done = subprocess.run(
            [place / "bin" / program, *words],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert Path(run("python", "-c", "import windlass; print(windlass.__file__)")).is_relative_to(packages)
    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_installed_wheel_works(command: Callable[..., str], tmp_path: Path) -> None:
    assert command("windlass", "--version") == f"windlass {windlass.__version__}\n"
    assert "site-packages/windlass)" in command("windlass", "env")
    script = tmp_path / "first.py"
    script.write_text(next(block.code for block in blocks(ROOT / "README.md") if "Trainer" in block.code))
    assert "eval_loss" in command("python", script)
    assert "eval_loss" in command("windlass", "launch", "--cpu", "--num_processes", "2", script)
    assert "python-docs" in command("windlass", "recipes")
    assert "checkpoint-2" in command("windlass", "train", *TINY, *SHORT, "--output-dir", "run")
    assert "whole" in command("windlass", "checkpoint", "ls", "run")
    assert "run/report.html" in command("windlass", "report", "run")
