"""Which releases of other packages are installed: for tests of what only some of them have."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def is_older(package: str, than: str) -> bool:
    """Whether the installed release of a package is older than another one."""
    return Version(Version(version(package)).base_version) < Version(than)


def needs(package: str, release: str, reason: str) -> pytest.MarkDecorator:
    """The mark of a test that needs a release of a package, or a newer one."""
    return pytest.mark.skipif(is_older(package, release), reason=f"needs {package} {release}: {reason}")
