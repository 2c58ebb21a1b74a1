"""A secret that a run is given reaches no file, no line and no error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.launching.test_local import windlass
from tests.dist.launch import ROOT, run_script

CANARY = "cAnArYdoNotWrite0123456789"
URL = f"memory://user:{CANARY}@bucket/run?X-Amz-Signature={CANARY}"


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    pytest.importorskip("fsspec")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("canary")
    script = ROOT / "tests/trainer/canary_run.py"
    command = [
        "windlass", "launch", "--cpu", "--num_processes", "1", "--log_dir", str(folder / "logs"),
        "--tee", "3", str(script), str(folder), "--hub_token", CANARY, f"--api-key={CANARY}", URL,
    ]  # fmt: skip
    environ = {
        "CANARY_URL": URL, "MY_API_KEY": CANARY, "WINDLASS_STAGING": str(folder / "staging"),
        "WINDLASS_HOME": "/nowhere", "TMPDIR": str(folder),
    }  # fmt: skip
    return folder, run_script(*command, timeout=300, expect=1, environ=environ)


def test_nothing_that_was_said_holds_it(looked: tuple[Path, str]) -> None:
    _, said = looked
    assert CANARY not in said
    assert "no answer from memory://***@bucket/run" in said, "the error itself is there"
    assert "api_key='***'" in said


def test_no_file_or_name_holds_it(looked: tuple[Path, str]) -> None:
    folder, _ = looked
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"report.html", "training_args.json", "metrics.jsonl", "README.md", "manifest.json"} <= {
        f.name for f in files
    }
    assert any(file.name.startswith("events.out") for file in files)
    assert any(file.name.startswith("uploaded-") for file in files), "the upload itself had the credentials"
    holding = [str(file) for file in files if CANARY.encode() in file.read_bytes() or CANARY in str(file)]
    assert not holding


def test_commands_that_show_settings_hold_it_back() -> None:
    code, said = windlass(
        "launch", "--cpu", "--print", "--env", f"MY_API_KEY={CANARY}", __file__, "--hub_token", CANARY, URL
    )
    assert code == 0, said
    assert CANARY not in said
    code, said = windlass("train", "--print-config", f"training.output_dir={URL}")
    assert code == 0, said
    assert CANARY not in said
    code, said = windlass(
        "train", f"training.hub_token={CANARY}", f"training.output_dir={URL}", "training.learning_rat=1"
    )
    assert code == 2
    assert CANARY not in said
