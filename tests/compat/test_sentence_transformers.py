"""Trainers of sentence-transformers and setfit, unmodified, on this engine: `run` and `launch --compat`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
pytest.importorskip("setfit", reason="setfit is not installed")
SCRIPT = str(Path(__file__).parent / "sentence_trainers.py")
NAMES = ("bi_encoder", "cross_encoder", "sparse_encoder", "setfit")


def results(*command: str) -> dict[str, Any]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env=environ
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    # setfit draws a progress bar on the same line.
    lines = [line.partition("RESULT ")[2] for line in ended.stdout.splitlines() if "RESULT " in line]
    return {row["name"]: row for row in map(json.loads, lines)}


def is_on_windlass(row: dict[str, Any]) -> bool:
    return "windlass" in row["engine"] and "transformers" not in row["engine"]


@pytest.mark.slow
def test_every_trainer_trains_to_the_bits_of_the_original() -> None:
    found, original = results("-m", "windlass", "run", SCRIPT, *NAMES), results(SCRIPT, *NAMES)
    assert tuple(found) == tuple(original) == NAMES
    for name in NAMES:
        ours, theirs = found[name], original[name]
        assert is_on_windlass(ours)
        assert not is_on_windlass(theirs)
        assert (
            ours["steps"] == theirs["steps"] == len([row for row in ours["rows"] if "grad_norm" in row]) > 1
        )
        for ours_row, theirs_row in zip(ours["rows"], theirs["rows"], strict=True):
            # Losses of batches are equal. An evaluation has their mean: in float64, there over rows in float32.
            assert ours_row == pytest.approx(theirs_row, rel=5e-6)
            if not any(key.startswith("eval_") for key in ours_row):
                assert ours_row == theirs_row
        assert ours.get("probabilities") == theirs.get("probabilities")
        assert ours.get("metrics") == theirs.get("metrics")


@pytest.mark.dist
@pytest.mark.slow
def test_a_trainer_trains_in_two_processes() -> None:
    names = NAMES[:1]  # one for each launch: models are written by every process only before there is a group
    flags = ("launch", "--compat", "--use_cpu", "--num_processes", "2")
    found = results("-m", "windlass", *flags, SCRIPT, *names)
    assert tuple(found) == names
    assert all(is_on_windlass(row) and (row["steps"], row["processes"]) == (4, 2) for row in found.values())
