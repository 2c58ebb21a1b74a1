"""What packages remark while they are imported is hidden; what a script's own calls lead to is not."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytest

from windlass.core.package_remarks import hidden_deprecations, muted_import_remarks

NOISY = """
import logging, warnings
def remark():
    logging.getLogger("torchao").warning("logged")
    warnings.warn("deprecated", FutureWarning)
    warnings.warn("too old a driver")
remark()
logging.getLogger("torchao").error("broken")
"""


def test_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "noisy_here.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(package))
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest, **options: shown.append(str(message)))
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        with muted_import_remarks():
            import noisy_here  # type: ignore[import-not-found]

            assert ([record.getMessage() for record in caplog.records], shown) == (
                ["broken"],
                ["too old a driver"],
            )
            noisy_here.remark()
        assert warnings.showwarning is before
    assert shown == ["too old a driver", "deprecated", "too old a driver"]
    assert [record.getMessage() for record in caplog.records] == ["broken", "logged"]
    assert not logging.getLogger("torchao").filters


def test_that_libraries_call_deprecated_functions_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hidden_deprecations():
            for module in ("peft.tuners", "mine"):
                warnings.warn_explicit("old", FutureWarning, "a.py", 1, module=module)
    assert [str(one.message) for one in caught] == ["old"]
