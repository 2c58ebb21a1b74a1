"""Which releases of other packages are installed: for tests of what only some of them have."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

_PINS = Path(__file__).parents[1] / "constraints.txt"


def is_older(package: str, than: str) -> bool:
    """Whether the installed release of a package is older than another one."""
    return Version(Version(version(package)).base_version) < Version(than)


def needs(package: str, release: str, reason: str) -> pytest.MarkDecorator:
    """The mark of a test that needs a release of a package, or a newer one."""
    return pytest.mark.skipif(is_older(package, release), reason=f"needs {package} {release}: {reason}")


def with_pinned(package: str) -> pytest.MarkDecorator:
    """The mark of a test whose expectations are the names, defaults or results of the release in constraints.txt."""
    [pinned] = re.findall(rf"(?m)^{package}==(\S+)", _PINS.read_text())
    try:
        installed = Version(version(package)).base_version
    except PackageNotFoundError:
        installed = "missing"
    reason = f"compares with {package} {pinned}, and {installed} is installed"
    return pytest.mark.skipif(installed != Version(pinned).base_version, reason=reason)
