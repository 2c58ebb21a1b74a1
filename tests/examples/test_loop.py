"""The scripts of `examples/` in one process and two, replicated and sharded, from the same configuration files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.dist.launch import launch_as, run_script

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


def test_a_loop_of_ones_own(root: Path, some_reviews: Path, tmp_path: Path) -> None:
    losses, weights = {}, {}
    for config in (None, "two_processes.yaml", "fsdp.yaml"):
        folder = tmp_path / str(config)
        words = (root / "examples/loop.py", "--data", some_reviews, "--output_dir", folder, *SHORT)
        file = root / "examples" / str(config)
        printed = launch_as("--config_file", file, *words) if config else run_script(*words, cwd=tmp_path)
        said = LINE.findall(printed)
        assert len(said) == 1, said  # one process reports for all
        losses[config] = float(said[0][0])
        weights[config] = load_file(folder / "model.safetensors")
    # Dropout differs between one process and two; replicated and sharded processes draw the same masks.
    assert all(0.5 < loss < 0.9 for loss in losses.values())
    assert losses["fsdp.yaml"] == pytest.approx(losses["two_processes.yaml"], abs=2e-4)
    shapes = [{name: t.shape for name, t in it.items()} for it in weights.values()]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.slow
def test_the_trainer_takes_the_same_file(root: Path, some_reviews: Path, tmp_path: Path) -> None:
    flags = (
        "--max_steps 3 --eval_strategy no --save_strategy no --load_best_model_at_end false --vocab_size 300"
    )
    words = ("--data", some_reviews, "--output_dir", tmp_path / "run", *flags.split())
    launcher = ("windlass", "launch", "--config_file", root / "examples/fsdp.yaml", root / "examples/sst2.py")
    printed = run_script(*launcher, *words, timeout=280)
    assert "dev accuracy" in printed
    assert (tmp_path / "run" / "model.safetensors").is_file()
