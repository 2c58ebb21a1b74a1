"""Checkpoints of runs under ZeRO: the same bits on the same ranks, and any other strategy and number of ranks."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.zero import resumed_runs, runs
from tests.zero.needed import needs_deepspeed

from windlass.checkpoint.sharded import load_parts, open_parts
from windlass.checkpoint.stored import load_folder, open_folder
from windlass.cli.main import main
from windlass.core.errors import CheckpointError

TOLERANCE = 5e-6

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module", params=[1, 2, 3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """`clean`: 8 updates; `stopped`: its first 4, from which others go on."""
    made, stage = tmp_path_factory.mktemp("zero"), request.param
    on_ranks(2, resumed_runs.main, made, f"clean:{stage}:8", f"stopped:{stage}:4")
    return made, stage


def weights(checkpoint: Path) -> list[torch.Tensor]:
    model = runs.Net()
    if (checkpoint / "model.parts.json").exists():
        load_parts(checkpoint, model)
    else:
        from windlass import load_weights

        load_weights(checkpoint, model)
    return list(model.state_dict().values())


def digest(checkpoint: Path) -> dict[str, str]:
    files = [*sorted(checkpoint.glob("model*")), *sorted(checkpoint.glob("optimizer*"))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_stopped_run_ends_with_the_same_bits(folder: tuple[Path, int]) -> None:
    made, stage = folder
    shutil.copytree(made / "stopped", made / "same")
    on_ranks(2, resumed_runs.main, made, f"same:{stage}:8:resume")
    clean, same = (digest(made / name / "checkpoint-8") for name in ("clean", "same"))
    assert {
        "model.parts.json",
        "model-rank-00001.safetensors",
        "optimizer-rank-00001.safetensors",
    } <= clean.keys()
    assert clean == same


@pytest.mark.parametrize(("ranks", "other"), [(1, -1), (2, -1), (4, 3), (2, 2)])
def test_another_strategy_or_number_of_ranks_continues(
    folder: tuple[Path, int], ranks: int, other: int
) -> None:
    made, _ = folder
    name = f"on{ranks}with{other}"
    shutil.copytree(made / "stopped", made / name)
    if ranks == 1 and other < 0:
        on_ranks(0, resumed_runs.main, made, f"{name}:{other}:8:resume")
    else:
        on_ranks(ranks, resumed_runs.main, made, f"{name}:{other}:8:resume")
    for ours, theirs in zip(
        weights(made / name / "checkpoint-8"), weights(made / "clean" / "checkpoint-8"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_checkpoint_of_another_strategy_is_continued(folder: tuple[Path, int]) -> None:
    made, stage = folder
    on_ranks(0, resumed_runs.main, made, f"alone{stage}:-1:4")
    on_ranks(2, resumed_runs.main, made, f"alone{stage}:{stage}:8:resume")
    for ours, theirs in zip(
        weights(made / f"alone{stage}" / "checkpoint-8"),
        weights(made / "clean" / "checkpoint-8"),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_an_export_equals_the_saved_model(folder: tuple[Path, int]) -> None:
    """To the bit: both are the fp32 values."""
    made, stage = folder
    checkpoint, saved = made / "clean" / "checkpoint-8", load_file(made / "clean" / "model.safetensors")
    target = made / "exported.safetensors"
    assert main(["checkpoint", "export", str(checkpoint), str(target)]) == 0
    assert main(["checkpoint", "export", str(checkpoint), str(made / f"exported{stage}")]) == 0
    for exported in (load_file(target), load_file(made / f"exported{stage}" / "model.safetensors")):
        assert exported.keys() == saved.keys()
        assert all(torch.equal(exported[name], value) for name, value in saved.items())
    moments = made / "moments.safetensors"
    assert main(["checkpoint", "export", str(checkpoint), str(moments), "--tensors", "optimizer"]) == 0
    assert load_file(moments)["inner.weight/exp_avg"].shape == saved["inner.weight"].shape


def test_the_commands_know_such_folders(folder: tuple[Path, int], capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = folder
    checkpoint = made / "clean" / "checkpoint-8"
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    assert main(["checkpoint", "ls", str(made / "clean")]) == 0
    assert "checkpoint-8" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(checkpoint), str(checkpoint)]) == 0
    assert main(["checkpoint", "diff", str(checkpoint), str(made / "clean" / "checkpoint-4")]) == 1
    shutil.copytree(checkpoint, made / "harmed")
    part = made / "harmed" / "model-rank-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert main(["checkpoint", "verify", str(made / "harmed")]) != 0
    with pytest.raises(CheckpointError, match="model-rank-00001"):
        load_folder(made / "harmed", runs.Net(), files=open_folder(made / "harmed").files)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_in_bf16_is_continued_from_its_fp32_values(stage: int, tmp_path: Path) -> None:
    on_ranks(
        2,
        resumed_runs.main,
        tmp_path,
        f"clean:{stage}b:8",
        f"stopped:{stage}b:4",
        f"stopped:{stage}b:8:resume",
    )
    clean, same = (digest(tmp_path / name / "checkpoint-8") for name in ("clean", "stopped"))
    assert clean == same
    with open_parts(tmp_path / "clean" / "checkpoint-8", "model") as parts:
        assert {parts.dtype(name) for name in parts.names} == {torch.float32}
        assert parts.aliases, "tied weights are written once"
        embedded = parts.read("model.embed_tokens.weight")
    assert not torch.equal(embedded, embedded.bfloat16().float()), "more than bf16 holds"
