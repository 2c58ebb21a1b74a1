"""Optional packages: what is asked for names the command that installs it."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from windlass.core.errors import MissingDependencyError, OutdatedDependencyError
from windlass.core.optional import (
    OLDEST,
    _distributed,
    check_installed,
    check_release,
    install_command,
    is_available,
    require,
    version_of,
)


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
    for name in ("torch", "PyYAML", "pytest"):
        assert version_of(name) == metadata.version(name)


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers write their runs into folders of their own names, which stay when the package goes."""
    (tmp_path / "codecarbon").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_available("codecarbon")
    with pytest.raises(MissingDependencyError, match="pip install codecarbon"):
        require("codecarbon", "measure")


def test_a_package_in_parts_of_several_distributions_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "azureml" / "mlflow").mkdir(parents=True)
    (tmp_path / "azureml" / "mlflow" / "__init__.py").write_text("")
    about = tmp_path / "azureml_mlflow-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: azureml-mlflow\nVersion: 1.0\n")
    (about / "RECORD").write_text("azureml/mlflow/__init__.py,,\n")
    _distributed.cache_clear()
    assert is_available("azureml")
    _distributed.cache_clear()


def test_the_version_of_a_distribution_in_the_older_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata are in a file of another name."""
    folder = tmp_path / "an_old_one.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: an-old-one\nVersion: 1.2.dev3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("an-old-one") == "1.2.dev3"


@pytest.mark.parametrize(
    ("package", "release"), [("torch", "2.8.0+cu126"), ("transformers", "4.57.6"), ("peft", "0.9")]
)
def test_a_release_that_is_too_old_is_named_with_the_one_that_is_needed(
    package: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older: Any = ModuleType(package)
    older.__version__ = release
    monkeypatch.setitem(sys.modules, package, older)
    for ask in (lambda: check_release(older), lambda: require(package, "work")):
        with pytest.raises(OutdatedDependencyError) as caught:
            ask()
        error = caught.value
        assert (error.package, error.found, error.needed) == (package, release, OLDEST[package])
        assert str(error) == (
            f"{package} {release} is too old: {package}>={OLDEST[package]} is needed. "
            f'Install it with: pip install --upgrade "{package}>={OLDEST[package]}"'
        )


@pytest.mark.parametrize("suffix", ["", ".0", ".dev20250901+cpu", ".1", "0.1"])
def test_the_oldest_release_and_newer_ones_are_taken(suffix: str) -> None:
    for package, oldest in OLDEST.items():
        found: Any = ModuleType(package)
        found.__version__ = oldest + suffix
        check_release(found)


def test_the_oldest_releases_are_those_of_the_metadata() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(line for name in ("hf", "datasets", "peft", "torchao") for line in extras[name]),
    ]
    found = dict(line.split(">=") for line in asked)
    assert {name: found[name] for name in OLDEST} == OLDEST
