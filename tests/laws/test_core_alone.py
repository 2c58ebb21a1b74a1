"""The core knows no other library's names: without `compat/`, `utils/` and the modules of names at the top it works."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.laws.core_alone import IMPORT_ALL, make_copy, run_alone, run_tests


def test_every_module_of_the_core_imports_alone(tmp_path: Path) -> None:
    make_copy(tmp_path)
    done = run_alone(["-c", IMPORT_ALL], tmp_path, 120)
    assert done.returncode == 0, done.stdout
    file, count = done.stdout.split()[-2:]
    assert file.startswith(str(tmp_path)), "the copy, not the package that is installed"
    assert int(count) > 400


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_the_tests_of_the_core_pass_alone(tmp_path: Path) -> None:
    make_copy(tmp_path, tests=True)
    done = run_tests(tmp_path, [])
    assert done.returncode == 0, done.stdout[-5000:]
