"""The scripts of `examples/` in one process and two, replicated and sharded, from the same configuration files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

for package in ("transformers", "tokenizers"):
    pytest.importorskip(package)

pytestmark = pytest.mark.dist
SHORT = ("--epochs", "1", "--max_steps", "3", "--vocab_size", "300")
LINE = re.compile(r"epoch 1: loss (\d\.\d{4}), dev accuracy (\d\.\d{4})")


@pytest.fixture(scope="module")
def some_reviews(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first sentences of the real data."""
    folder = tmp_path_factory.mktemp("sst2")
    for name, count in (("train.tsv", 300), ("dev.tsv", 100)):
        lines = (shared_data / "sst2" / name).read_text("utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:count]), "utf-8")
    return folder


def run(root: Path, script: str, config: str | None, data: Path, folder: Path, *flags: str) -> str:
    """What an example prints, started plainly or by the launcher with one of the example's files."""
    file = str(root / "examples" / str(config))
    launcher = [] if config is None else ["-m", "windlass", "launch", "--config_file", file]
    script = str(root / "examples" / script)
    done = subprocess.run(
        [sys.executable, *launcher, script, "--data", str(data), "--output_dir", str(folder), *flags],
        cwd=folder.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_loop_of_ones_own(root: Path, some_reviews: Path, tmp_path: Path) -> None:
    losses, weights = {}, {}
    for config in (None, "two_processes.yaml", "fsdp.yaml"):
        folder = tmp_path / str(config)
        said = LINE.findall(run(root, "loop.py", config, some_reviews, folder, *SHORT))
        assert len(said) == 1, said  # one process speaks for all
        losses[config] = float(said[0][0])
        weights[config] = load_file(folder / "model.safetensors")
    # Dropout differs between one process and two; replicated and sharded processes draw the same masks.
    assert all(0.5 < loss < 0.9 for loss in losses.values())
    assert losses["fsdp.yaml"] == pytest.approx(losses["two_processes.yaml"], abs=2e-4)
    shapes = [{name: t.shape for name, t in it.items()} for it in weights.values()]
    assert shapes[0] == shapes[1] == shapes[2]


def test_the_trainer_takes_the_same_file(root: Path, some_reviews: Path, tmp_path: Path) -> None:
    flags = (
        "--max_steps 3 --eval_strategy no --save_strategy no --load_best_model_at_end false --vocab_size 300"
    )
    printed = run(root, "sst2.py", "fsdp.yaml", some_reviews, tmp_path / "run", *flags.split())
    assert "dev accuracy" in printed
    assert (tmp_path / "run" / "model.safetensors").is_file()
