"""A new interpreter that calls the function in a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from windlass.compat.function_rank import write_call
from windlass.compat.function_transfer import pack_call


def test_the_call_finds_path_arguments_and_threads(tmp_path: Path) -> None:
    def writes(name: str) -> None:
        import torch

        where = [str(torch.get_num_threads()), str(tmp_path) in sys.path, sys.argv[0]]
        (tmp_path / name).write_text(" ".join(map(str, where)))

    sys.path.append(str(tmp_path))
    try:
        arguments = write_call(tmp_path, pack_call(writes, ("out",)), 3)
    finally:
        sys.path.remove(str(tmp_path))
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out").read_text() == f"3 True {sys.argv[0]}"
