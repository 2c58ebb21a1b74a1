"""What lies in a checkpoint and in an output folder, and who can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import (
    Net,
    arguments,
    bert,
    llama,
    rows,
    text_rows,
    token_rows,
    tokenizer,
    weights_hash,
)

from windlass import DataCollatorWithPadding, Trainer, load_weights
from windlass.core.errors import CheckpointError, ConfigError
from windlass.dist.gang import Gang

transformers = pytest.importorskip("transformers", reason="reads the checkpoints")


def saving(folder: Path, **changes: Any) -> Any:
    return arguments(folder, max_steps=2, save_strategy="steps", save_steps=1, **changes)


@pytest.mark.parametrize("kind", ["untied", "tied", "classifier"])
def test_auto_classes_read_a_checkpoint(tmp_path: Path, kind: str) -> None:
    model = bert(3) if kind == "classifier" else llama(tied=kind == "tied")
    auto = (
        transformers.AutoModelForSequenceClassification
        if kind == "classifier"
        else transformers.AutoModelForCausalLM
    )
    data = token_rows(8, labels=3) if kind == "classifier" else text_rows(8)
    Trainer(model, saving(tmp_path), train_dataset=data).train()
    read, info = auto.from_pretrained(tmp_path / "checkpoint-2", output_loading_info=True)
    assert type(read) is type(model)
    assert not any(info.values()), info
    assert weights_hash(read) == weights_hash(model)
    if kind == "tied":
        assert read.lm_head.weight.data_ptr() == read.model.embed_tokens.weight.data_ptr()
    base = transformers.AutoModel.from_pretrained(tmp_path / "checkpoint-1")
    assert sum(p.numel() for p in base.parameters()) > 0


def test_save_model_and_its_folder(tmp_path: Path) -> None:
    trainer = Trainer(bert(), arguments(tmp_path), train_dataset=token_rows(8), processing_class=tokenizer())
    trainer.save_model()
    trainer.save_model(str(tmp_path / "there"))
    for folder in (tmp_path, tmp_path / "there"):
        read = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        assert weights_hash(read) == weights_hash(trainer.model)
        assert transformers.AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer().get_vocab()
        assert json.loads((folder / "training_args.json").read_text())["learning_rate"] == 0.05


@pytest.mark.parametrize("carrier", ["processing_class", "tokenizer", "data_collator"])
def test_the_tokenizer_lies_in_the_checkpoint_whoever_carries_it(tmp_path: Path, carrier: str) -> None:
    words = tokenizer()
    given = {carrier: DataCollatorWithPadding(words) if carrier == "data_collator" else words}
    Trainer(bert(), saving(tmp_path), train_dataset=token_rows(8), **given).train()
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint-2")
    assert read("w3 w4")["input_ids"] == words("w3 w4")["input_ids"] == [3, 4]


def test_special_tokens_reach_the_configurations(tmp_path: Path) -> None:
    words = tokenizer()
    words.add_special_tokens({"eos_token": "w7", "bos_token": "w8"})
    trainer = Trainer(llama(), saving(tmp_path), train_dataset=text_rows(8), processing_class=words)
    assert trainer.model.config.eos_token_id == 2
    trainer.train()
    for config in (trainer.model.config, trainer.model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 8, 7)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "checkpoint-2").eos_token_id == 7


def test_a_plain_module_is_read_back(tmp_path: Path) -> None:
    trainer = Trainer(Net(), saving(tmp_path), train_dataset=rows(8))
    trainer.train()
    other = Net(seed=9)
    assert weights_hash(other) != weights_hash(trainer.model)
    load_weights(tmp_path / "checkpoint-2", other)
    assert weights_hash(other) == weights_hash(trainer.model)


def test_own_files_in_a_checkpoint(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(str(output_dir), "mine.txt").write_text("here")

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            self.read = Path(resume_from_checkpoint, "mine.txt").read_text()
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    trainer = Mine(Net(), saving(tmp_path), train_dataset=rows(8))
    trainer.train()
    assert "mine.txt" in json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["files"]
    resumed = Mine(Net(), arguments(tmp_path, max_steps=3), train_dataset=rows(8))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.read == "here"
    (tmp_path / "checkpoint-2" / "mine.txt").write_text("gone")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_script_whose_save_writes_no_weights_is_resumed(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            Path(str(output_dir), "mine.txt").write_text("here")

    trainer = Mine(Net(), saving(tmp_path), train_dataset=rows(8))
    trainer.train()
    trained = weights_hash(trainer.model)
    resumed = Mine(Net(seed=9), arguments(tmp_path, max_steps=2), train_dataset=rows(8))
    resumed.train(resume_from_checkpoint=True)
    assert weights_hash(resumed.model) == trained
    assert (tmp_path / "checkpoint-2" / "mine.txt").exists()


def test_no_pickle_lies_in_a_checkpoint(tmp_path: Path) -> None:
    Trainer(bert(), saving(tmp_path), train_dataset=token_rows(8), processing_class=tokenizer()).train()
    endings = {path.suffix for path in (tmp_path / "checkpoint-2").iterdir()}
    assert endings <= {".json", ".safetensors", ".txt", ".jinja"}


def test_a_checkpoint_of_the_model_alone(tmp_path: Path) -> None:
    trainer = Trainer(Net(), saving(tmp_path, save_only_model=True), train_dataset=rows(8))
    trainer.train()
    names = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert "model.safetensors" in names
    assert not any(name.startswith(("optimizer", "schedule", "loop")) for name in names)
    with pytest.raises(CheckpointError, match="save_only_model"):
        trainer.train(resume_from_checkpoint=True)


def test_errors_of_resuming_say_where(tmp_path: Path) -> None:
    trainer = Trainer(Net(), saving(tmp_path), train_dataset=rows(8))
    with pytest.raises(CheckpointError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="Can't find a valid checkpoint at"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    trainer.train()
    wide = Trainer(Net(width=5), saving(tmp_path), train_dataset=[{"x": torch.ones(5), "labels": 0}] * 8)
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        wide.train(resume_from_checkpoint=True)


def test_arguments_that_changed_are_listed_once(tmp_path: Path, caplog: Any) -> None:
    Trainer(Net(), saving(tmp_path), train_dataset=rows(8)).train()
    caplog.clear()
    changed = arguments(
        tmp_path, max_steps=3, learning_rate=0.01, per_device_train_batch_size=2, weight_decay=0.5
    )
    trainer = Trainer(Net(), changed, train_dataset=rows(8))
    trainer.train(resume_from_checkpoint=True)
    kept, said = sorted(
        {r.getMessage() for r in caplog.records if "differ from the checkpoint" in r.getMessage()}
    )
    assert "have no effect" in kept
    assert "weight_decay: 0.5 (from args) != 0.0 (from " in kept
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.0
    assert "weight_decay" not in said
    assert "learning_rate: 0.01 (from args) != 0.05 (from " in said
    assert "per_device_train_batch_size: 2 (from args) != 4" in said
    assert "output_dir" not in said
    assert trainer.state.train_batch_size == 2


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_keeps_the_last(tmp_path: Path, limit: int) -> None:
    args = arguments(tmp_path, max_steps=5, save_strategy="steps", save_steps=1, save_total_limit=limit)
    Trainer(Net(), args, train_dataset=rows(20)).train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (4, 5)[-limit:]
    ]


def test_arguments_make_no_folder_but_training_does(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "new"
    trainer = Trainer(Net(), saving(folder), train_dataset=rows(8))
    assert not folder.exists()
    trainer.train()
    assert folder.is_dir()
    Trainer(Net(), saving(folder), train_dataset=rows(8)).train()
    assert any("holds another run" in record.getMessage() for record in caplog.records)


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer(Net(), saving(tmp_path / "file" / "out"), train_dataset=rows(8))
    with pytest.raises(ConfigError, match="output_dir"):
        trainer.train()


def test_a_rank_that_lost_another_leaves_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may still be in one of those before: with four ranks, two would wait for each other."""
    lost, gather = [], Gang.gather_objects

    class Loses:
        def state_dict(self) -> dict[str, Any]:
            if trainer.state.global_step == 0:  # it is tried before a run begins
                return {}
            lost.append(True)
            raise RuntimeError("Connection reset by peer")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def in_another_one(gang: Gang, value: Any) -> list[Any]:
        assert not lost
        return gather(gang, value)

    monkeypatch.setattr(Gang, "gather_objects", in_another_one)
    trainer = Trainer(Net(), saving(tmp_path), train_dataset=rows(8))
    trainer.accelerator.register_for_checkpointing(Loses())
    with pytest.raises(RuntimeError, match="reset by peer"):
        trainer.train()
