"""Optional packages: what is asked for names the command that installs it."""

from __future__ import annotations

import sys

import numpy
import pytest

from windlass.core.errors import MissingDependencyError
from windlass.core.optional import check_installed, install_command, require, version_of


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("transformers", None, 'pip install "windlass-trainer[hf]"'),
        ("transformers", "train", 'pip install "windlass-trainer[train]"'),
        ("dropboxdrivefs", None, "pip install dropboxdrivefs"),
    ],
)
def test_a_package_that_is_missing(
    package: str, extra: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert install_command(package, extra) == command
    wanted = f"{package} is needed to work, and it is not installed. Install it with: {command}"
    with pytest.raises(MissingDependencyError) as caught:
        check_installed(package, "work", extra)
    assert str(caught.value) == wanted
    if extra is None:
        with pytest.raises(MissingDependencyError) as caught:
            require(f"{package}.part", "work")
        assert str(caught.value) == wanted


def test_an_installed_package_is_not_imported() -> None:
    sys.modules.pop("this", None)
    check_installed("this", "read")
    assert "this" not in sys.modules
    assert version_of("numpy") == numpy.__version__
    assert version_of("a-distribution-that-does-not-exist") is None
