"""A copy of the repository without what other libraries named: `compat/`, `utils/` and the modules of names at the top.

`python -m tests.laws.core_alone` makes one and runs the tests of the core in it; further arguments go to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.laws.source import PACKAGE, ROOT

# What is left out, beside the single files at the top of the package.
OUTSIDE = {"compat", "utils"}
KEPT_AT_THE_TOP = {"__init__.py", "__main__.py"}
# The tests of the core, but for three files and a test that use readers in `compat/`, modules of names, or `utils/`.
TESTS = (
    "tests/core", "tests/dist", "tests/optim", "tests/data", "tests/engine", "tests/checkpoint",
    "tests/metrics", "tests/precision", "tests/callbacks",
    "tests/trainer/test_run.py", "tests/trainer/test_resume.py", "tests/trainer/test_run_checkpoints.py",
    "tests/trainer/test_losses.py", "tests/trainer/test_evaluator.py",
    "--ignore=tests/checkpoint/test_malicious_places.py", "--ignore=tests/core/test_lazy.py",
    "--ignore=tests/dist/test_operations.py",
    "--deselect=tests/core/test_script_command.py::test_or_the_flag_that_their_parser_has",
)  # fmt: skip

IMPORT_ALL = """
import importlib, pkgutil, sys
import windlass

def fail(name):
    raise
names = [m.name for m in pkgutil.walk_packages(windlass.__path__, "windlass.", onerror=fail)]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(windlass.__file__, len(names))
"""


def make_copy(folder: Path, tests: bool = False) -> Path:
    """Copy the package, and with `tests` what its tests need, into `folder`; return the copy's folder of sources. With
    their bytecode, which is valid there: to compile them takes longer than to import them.
    """

    def outside(directory: str, names: list[str]) -> set[str]:
        if Path(directory) != PACKAGE:
            return set()
        files = {name for name in names if name.endswith(".py")} - KEPT_AT_THE_TOP
        return (OUTSIDE & set(names)) | files

    shutil.copytree(PACKAGE, folder / "src" / "windlass", ignore=outside)
    if tests:
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=outside)
        for name in ("pyproject.toml", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
    return folder / "src"


def run_alone(command: list[str], folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run Python with the copy in `folder` in place of the package."""
    environ = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environ, text=True, timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_tests(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of the core in the copy in `folder`."""
    return run_alone(["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *arguments], folder, 3600)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        make_copy(Path(folder), tests=True)
        done = run_tests(Path(folder), sys.argv[1:])
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
