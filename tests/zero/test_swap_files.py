"""Tensors in files between steps: training as in memory, and checkpoints that hold them."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import failure_on_ranks, on_ranks
from tests.zero import swapped_loop
from tests.zero.needed import needs_deepspeed
from tests.zero.swapped_runs import Wide, main
from tests.zero.test_zero_checkpoints import digest

from windlass.core.errors import ConfigError
from windlass.core.optional import is_available
from windlass.zero.swap_files import check_buffers, lock_files

TOLERANCE = 5e-6
NO_COMPILER = "needs libaio with its headers: apt-get install libaio-dev"


def compiles() -> bool:
    """Return True if DeepSpeed can compile its access to files here."""
    if not is_available("deepspeed"):
        return False
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not compiles():
        pytest.skip(NO_COMPILER)
    return tmp_path_factory.mktemp("swapped")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    [alone] = on_ranks(0, main, folder, "alone:alone:6")
    words = ("memory:memory:6", "memory-built:memory-built:6")
    return alone | on_ranks(2, main, folder, *words, timeout=900)[0]


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_files"),
    [
        ("optimizer", ["exp_avg"]),
        ("params", ["_param"]),
        ("both", ["exp_avg", "_param"]),
        ("both-built", ["_param"]),
    ],
)
def test_a_run_equals_one_in_memory_and_resumes_to_the_same_bits(
    kind: str, in_files: list[str], folder: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Also one whose processes were killed."""
    _, _, built = kind.partition("-")
    in_memory = f"memory-{built}" if built else "memory"
    found = on_ranks(2, main, tmp_path, f"clean:{kind}:6", f"same:{kind}:3", timeout=900)[0]["clean"]
    failure_on_ranks(2, main, tmp_path, f"killed:{kind}:6:killed", timeout=900)
    on_ranks(2, main, tmp_path, f"same:{kind}:6:resume", f"killed:{kind}:6:resume", timeout=900)
    memory, alone = dict(expected[in_memory]), expected["alone"]
    files = found.pop("files")
    assert all(any(part in name for name in files) for part in in_files), "they were in files"
    assert not memory.pop("files")
    assert found == memory
    saved = load_file(tmp_path / "clean" / "model.safetensors")
    if not built:
        assert found["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
        for name, value in load_file(folder / "alone" / "model.safetensors").items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=TOLERANCE)
    clean, same, killed = (digest(tmp_path / name / "checkpoint-6") for name in ("clean", "same", "killed"))
    assert "optimizer-rank-00001.safetensors" in clean
    assert clean == digest(folder / in_memory / "checkpoint-6") == same == killed


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["optimizer", "both"])
def test_a_checkpoint_of_files_is_continued_in_one_process_and_back(
    kind: str, folder: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(2, main, tmp_path, f"first:{kind}:3", timeout=900)
    shutil.copytree(tmp_path / "first", tmp_path / "on")
    on_ranks(0, main, tmp_path, "on:alone:6:resume")
    on_ranks(0, main, tmp_path, "back:alone:3")
    on_ranks(2, main, tmp_path, f"back:{kind}:6:resume", timeout=900)
    weights = load_file(folder / "alone" / "model.safetensors")
    for run in ("on", "back"):
        for name, value in load_file(tmp_path / run / "model.safetensors").items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=TOLERANCE)


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_references_beside_the_trained_model_have_files_of_their_own(tmp_path: Path) -> None:
    if not compiles():
        pytest.skip(NO_COMPILER)
    cpu, nvme = (on_ranks(2, swapped_loop.main, tmp_path, d, timeout=600)[0] for d in ("cpu", "nvme"))
    assert nvme == cpu
    assert len(list(tmp_path.rglob("*_param.tensor.swp"))) == 6, "of each model, on each rank"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"buffer_size": 1 << 18}, "buffer_size.*524288 elements of a rank's part of middle.weight"),
        ({"buffer_size": 1 << 20, "buffer_count": 0}, "buffer_count.*the 1 large parameters of frozen"),
    ],
)
def test_buffers_that_are_too_small_are_named(section: dict[str, int], words: str) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", **section}}}
    with pytest.raises(ConfigError, match=words):
        check_buffers(Wide(), config, 2)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    with lock_files(config, 0), pytest.raises(ConfigError, match="give each one of its own"):
        lock_files(config, 0)
    with lock_files(config, 0):
        """It is free again."""


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = {"device": "nvme", "nvme_path": str(tmp_path / "file" / "folder")}
    config = {"zero_optimization": {"stage": 3, "offload_param": section}}
    with pytest.raises(ConfigError, match=r"offload_param.nvme_path.*cannot be written"):
        lock_files(config, 0)


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("windlass.zero.swap_files.fcntl.flock", refuse)
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": section}}
    with pytest.raises(ConfigError, match=r"nvme_path.*cannot be locked \(No locks available\)"):
        lock_files(config, 0)
