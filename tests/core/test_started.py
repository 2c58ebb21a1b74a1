from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SHOWS = (
    "import os, sys; {}; import windlass; os.chdir('/'); print(sys.modules['windlass.core.started'].FOLDER)"
)


@pytest.mark.parametrize(("before", "left"), [("pass", "here"), ("os.rmdir(os.getcwd())", None)])
def test_the_folder_is_that_of_the_import(before: str, left: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    command = [sys.executable, "-c", _SHOWS.format(before)]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    assert shown == (str(folder) if left else "")
