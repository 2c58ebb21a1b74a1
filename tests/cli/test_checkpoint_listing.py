"""`windlass checkpoint ls` and `verify` of folders that another program wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.cli.main import main


@pytest.mark.parametrize(("command", "code"), [("ls", 0), ("verify", 1)])
def test_what_transformers_wrote_is_called_that(
    command: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-9"
    folder.mkdir()
    for name in ("trainer_state.json", "optimizer.pt"):
        (folder / name).write_bytes(b"{}")
    assert main(["checkpoint", command, str(tmp_path)]) == code
    assert "transformers' Trainer wrote it, without hashes to verify it by" in capsys.readouterr().out
