"""Names and texts that a checkpoint's author chose reach the terminal as text, never as commands to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_view import read_run
from windlass.cli.main import main

EVIL = "\x1b]0;owned\x07\x1b[2J\u202egnp.\u2066\x9b31m"
LETTERS = "\x1b\x07\x9b\u202e\u2066\r"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints whose names, files, and manifests hold escape sequences."""
    folder = tmp_path / f"run-{EVIL}"
    for step, manifest in (
        (1, {"format": EVIL}),
        (
            2,
            {
                "version": 1,
                "step": 2,
                "files": {f"../{EVIL}": {"size": 1, "sha256": EVIL}},
                "meta": {"metric": EVIL},
            },
        ),
    ):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        (checkpoint / f"file{EVIL}\nlines").write_text("x")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "manifest.json").write_text(f"{{{EVIL}")
    return folder


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "export", "prune"])
def test_no_command_hands_it_to_the_terminal(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "ls": [run], "verify": [run], "diff": [run / "checkpoint-1", run / "checkpoint-2"],
        "export": [run / "checkpoint-2", run / "out"], "prune": [run, "--keep-last", "1"],
    }[command]  # fmt: skip
    main(["checkpoint", command, *map(str, words)])
    out, err = capsys.readouterr()
    assert out + err
    assert not set(LETTERS) & set(out + err)


def test_nor_does_a_page(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "event": "log", "loss": 1.0, f"eval_{EVIL}": 2.0, "timing": {"wall": 1.0}})
        + "\n"
    )
    page = render_page([summarised(read_run(run))])
    assert "checkpoint-2" in page
    assert not set(LETTERS) & set(page)
