"""Folders that DeepSpeed itself wrote on two ranks are read as weights, and half ones are refused by name."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.compat import deepspeed_alone
from tests.dist.launch import launch
from tests.zero.needed import needs_deepspeed

from windlass.checkpoint.stored import load_folder, open_folder, open_weights
from windlass.cli.main import main
from windlass.core.errors import CheckpointError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]
KINDS = ("0", "1", "2", "3", "1b", "3b")
TIED = {"head.weight": "embed.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepspeed")
    launch(2, Path(deepspeed_alone.__file__), made, *KINDS, timeout=400)
    return made


def read(path: Path) -> dict[str, torch.Tensor]:
    with open_weights(open_folder(path)) as tensors:
        assert tensors.aliases == TIED
        return {name: tensors.read(name) for name in tensors.names}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_run_and_of_deepspeeds_own_converter(kind: str, folder: Path) -> None:
    found, kept = read(folder / f"stage{kind}"), load_file(folder / f"stage{kind}.safetensors")
    assert kept.keys() - TIED.keys() == found.keys()
    for name, value in found.items():
        assert torch.equal(value.to(kept[name].dtype), kept[name]), name
    within = read(folder / f"stage{kind}" / "global_step3")
    assert all(torch.equal(found[name], value) for name, value in within.items())
    if kind == "0":
        return  # which its converter does not read
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for name, value in get_fp32_state_dict_from_zero_checkpoint(str(folder / f"stage{kind}")).items():
        assert torch.equal(found[TIED.get(name, name)].to(value.dtype), value), name


def test_bf16_runs_have_their_fp32_values(folder: Path) -> None:
    values = read(folder / "stage3b")["embed.weight"]
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float()), "more than bf16 holds"


def test_a_model_is_loaded_and_a_file_exported(folder: Path, tmp_path: Path) -> None:
    model, kept = deepspeed_alone.Tied(), load_file(folder / "stage3.safetensors")
    load_folder(folder / "stage3", model)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert main(["checkpoint", "export", str(folder / "stage2"), str(tmp_path / "out.safetensors")]) == 0
    exported = load_file(tmp_path / "out.safetensors")
    kept = load_file(folder / "stage2.safetensors")
    assert exported.keys() == kept.keys() - TIED.keys()
    assert all(torch.equal(value, kept[name]) for name, value in exported.items())


@pytest.fixture
def damaged(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copytree(folder / f"stage{request.param}", tmp_path / "half")
    return tmp_path / "half"


def flip_storages(path: Path) -> None:
    """Flip the first bit of each storage of a file of torch.save."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
    for info in infos:
        lengths = struct.unpack("<HH", content[info.header_offset + 26 : info.header_offset + 30])
        content[info.header_offset + 30 + sum(lengths)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["1", "3"], indirect=True)
def test_half_folders_are_refused_by_name(damaged: Path) -> None:
    tag = damaged / "global_step3"
    second = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it, and there are optimizer states of 1"):
        read(damaged)
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states"):
        read(damaged)
    second.write_bytes(content)
    flip_storages(second)
    with pytest.raises(CheckpointError, match="damaged"):
        read(damaged)
    (damaged / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match="'global_step4', which is not a folder beside it"):
        read(damaged)
    (tag / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="tensor, pipeline or expert parallelism"):
        read(tag)


@pytest.mark.parametrize("damaged", ["3"], indirect=True)
def test_the_model_states_of_a_rank_are_missed(damaged: Path) -> None:
    (damaged / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="model states of 1 ranks, and optimizer states of 2"):
        read(damaged)
