"""What a Trainer saves of a model of transformers, in checkpoints too, is what its `save_pretrained` writes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.test_pretrained import FAMILIES, assert_same_files
from tests.dist.launch import on_ranks
from tests.trainer.small import arguments, llama, text_rows, tokenizer

from windlass import Trainer
from windlass.checkpoint import content, split, weights
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import local
from windlass.trainer import model_writer

transformers = pytest.importorskip("transformers")


def saving(folder: Path, **changes: Any) -> Any:
    return arguments(folder, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **changes})


def family(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name]()


def models_files(folder: Path, like: Path, into: Path) -> Path:
    """Copy those files of a checkpoint that a model's folder has, and check that all are there."""
    into.mkdir()
    for path in like.iterdir():
        (into / path.name).write_bytes((folder / path.name).read_bytes())
    return into


@pytest.mark.parametrize("name", ["mixture of experts", "vision and language", "tied", "encoder-decoder"])
def test_checkpoints_equal_save_pretrained_and_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = Trainer(family(name), saving(tmp_path / "whole"), train_dataset=text_rows(16))
    whole.train()
    whole.model.save_pretrained(tmp_path / "theirs")
    last = tmp_path / "whole" / "checkpoint-4"
    assert_same_files(models_files(last, tmp_path / "theirs", tmp_path / "copied"), tmp_path / "theirs")
    whole.save_model(str(tmp_path / "final"))
    (tmp_path / "final" / "training_args.json").unlink()
    assert_same_files(tmp_path / "final", tmp_path / "theirs")
    resumed = Trainer(family(name), saving(tmp_path / "resumed"), train_dataset=text_rows(16))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, got), wanted in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    assert (tmp_path / "resumed" / "checkpoint-4" / WEIGHTS_NAME).read_bytes() == (
        last / WEIGHTS_NAME
    ).read_bytes()


@pytest.mark.dist
def test_a_sharded_model_is_saved_alike(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)


class OwnWay(transformers.LlamaForCausalLM):
    """Writes its weights in several files, and a note."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, **{**options, "max_shard_size": "5KB"})
        Path(save_directory, "note.txt").write_text("mine")


def test_large_weights_are_saved_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weights, content, model_writer):
        monkeypatch.setattr(module, "LARGEST_FILE", 5_000)
    whole = Trainer(llama(), saving(tmp_path / "whole"), train_dataset=text_rows(16))
    whole.train()
    whole.model.save_pretrained(tmp_path / "theirs", max_shard_size=5_000)
    whole.save_model(str(tmp_path / "final"))
    theirs = {path.name for path in (tmp_path / "theirs").glob("model*")}
    assert len(theirs) > 2
    wanted = whole.model.state_dict()
    for folder in (tmp_path / "final", tmp_path / "whole" / "checkpoint-4"):
        assert {path.name for path in folder.glob("model*")} == theirs
        assert places(folder) == places(tmp_path / "theirs")
        read = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert read.keys() == wanted.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())
    listed = json.loads((tmp_path / "whole" / "checkpoint-4" / "manifest.json").read_text())["files"]
    assert theirs <= listed.keys()
    resumed = Trainer(llama(), saving(tmp_path / "resumed"), train_dataset=text_rows(16))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    monkeypatch.undo()
    whole.save_model(str(tmp_path / "final"))
    assert {path.name for path in (tmp_path / "final").glob("model*")} == {WEIGHTS_NAME}


def places(folder: Path) -> Any:
    return json.loads((folder / split.SPLIT_INDEX_NAME).read_text())["weight_map"]


class OnlyHead(transformers.LlamaForCausalLM):
    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        head = {name: value for name, value in self.state_dict().items() if "lm_head" in name}
        super().save_pretrained(save_directory, **{**options, "state_dict": head})


def test_an_overridden_save_pretrained_is_called(tmp_path: Path) -> None:
    def run(folder: str) -> Trainer:
        model = OwnWay(llama().config)
        model.load_state_dict(llama().state_dict())
        return Trainer(
            model, saving(tmp_path / folder), train_dataset=text_rows(16), processing_class=tokenizer()
        )

    whole = run("whole")
    whole.train()
    last = tmp_path / "whole" / "checkpoint-4"
    assert (last / "note.txt").read_text() == "mine"
    assert (last / "tokenizer_config.json").exists()
    assert (last / "training_args.json").exists()
    assert not (last / WEIGHTS_NAME).exists()
    listed = json.loads((last / "manifest.json").read_text())["files"]
    assert {path.name for path in last.iterdir()} == {*listed, "manifest.json"}
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for got, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, wanted)
    whole.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "note.txt").exists()


def test_a_save_pretrained_that_leaves_out_weights_is_named_on_resume(tmp_path: Path) -> None:
    Trainer(OnlyHead(llama().config), saving(tmp_path), train_dataset=text_rows(16)).train()
    trainer = Trainer(OnlyHead(llama().config), saving(tmp_path), train_dataset=text_rows(16))
    with pytest.raises(CheckpointError, match="missing in the file"):
        trainer.train(resume_from_checkpoint=True)


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """What transformers logs."""
    stream, theirs = io.StringIO(), logging.getLogger("transformers")
    handler, before = logging.StreamHandler(stream), theirs.level
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    yield stream
    theirs.removeHandler(handler)
    theirs.setLevel(before)


@pytest.mark.parametrize("own", [False, True])
def test_what_transformers_logs_names_the_checkpoint(own: bool, tmp_path: Path, said: io.StringIO) -> None:
    model = (OwnWay if own else transformers.LlamaForCausalLM)(llama().config)
    Trainer(model, saving(tmp_path), train_dataset=text_rows(16), processing_class=tokenizer()).train()
    text = said.getvalue()
    for step in (2, 4):
        assert f"Configuration saved in {tmp_path / f'checkpoint-{step}' / 'config.json'}\n" in text
    assert "/windlass-" not in text
    assert "tmp-checkpoint" not in text


# --- what each rank runs ----------------------------------------------------------------------------------------------


def run(name: str, kind: str, folder: Path, resume: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    args = arguments(
        folder, max_steps=2, save_strategy="steps", save_steps=1, fsdp="full_shard",
        fsdp_config={"state_dict_type": kind},
    )  # fmt: skip
    trainer = Trainer(FAMILIES[name](), args, train_dataset=text_rows(16))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def check(name: str, kind: str, folder: Path) -> None:
    whole = run(name, kind, folder / "whole")
    whole.save_model(str(folder / "final"))
    resumed = run(name, kind, folder / "resumed", folder / "whole" / "checkpoint-1")
    for got, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(local(got), local(wanted))
    if not whole.is_world_process_zero():
        return
    (folder / "final" / "training_args.json").unlink()
    type(FAMILIES[name]()).from_pretrained(folder / "final").save_pretrained(folder / "again")
    assert_same_files(folder / "final", folder / "again")
    if kind == "FULL_STATE_DICT":
        saved = folder / "whole" / "checkpoint-2" / WEIGHTS_NAME
        assert load_file(saved).keys() == load_file(folder / "final" / WEIGHTS_NAME).keys()


def main(folder: Path) -> None:
    for name in ("mixture of experts", "tied"):
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            check(name, kind, folder / name.replace(" ", "-") / kind)
