"""A run that transformers' Trainer began ends here as it would have ended there."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import continuing_ranks
from tests.trainer.small import Net, bert, llama, rows, settings, text_rows, token_rows
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import windlass
from windlass import Trainer, TrainingArguments
from windlass.checkpoint.files import Files
from windlass.checkpoint.weights import save_weights
from windlass.compat.readers.torch_file import open_torch_file
from windlass.core.errors import CheckpointError, DataError

transformers = pytest.importorskip("transformers", reason="continues what transformers' Trainer wrote")
pytest.importorskip("accelerate", reason="transformers' trainer needs it")

CLOSE = {"rtol": 0, "atol": 1e-6}
CAST = "windlass.trainer.continuing"


class Normed(nn.Module):
    """Its batch norm decays in transformers and does not here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.last(self.between(self.first(x)))
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Theirs, without shuffling."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OursInOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return settings(
        folder,
        **{
            "max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1,
            "weight_decay": 0.1, "warmup_steps": 2, "learning_rate": 0.01, **changes,
        },
    )  # fmt: skip


def theirs(folder: Path, model: nn.Module, data: Any, **changes: Any) -> Any:
    """A whole run of theirs, with a checkpoint of every step."""
    trainer = InOrder(
        model=model,
        args=transformers.TrainingArguments(**options(folder, **changes)),
        train_dataset=data,
    )
    trainer.train()
    return trainer


def ours(folder: Path, model: nn.Module, data: Any, resume: Any, **changes: Any) -> Any:
    trainer = OursInOrder(
        model=model, args=TrainingArguments(**options(folder, **changes)), train_dataset=data
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def assert_same_end(mine: Any, other: Any) -> None:
    assert mine.state.global_step == other.state.global_step
    assert losses(mine) == pytest.approx(losses(other), abs=2e-6)
    for (name, got), wanted in zip(
        mine.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got, wanted, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    rates = [
        [row["learning_rate"] for row in t.state.log_history if "learning_rate" in row] for t in (mine, other)
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without decay": {"weight_decay": 0.0},
    "cosine": {"lr_scheduler_type": "cosine"},
    "by steps": {"max_steps": 7},
    "momentum": {"optim": "sgd"},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_go_on_as_there(name: str, tmp_path: Path) -> None:
    """From the middle of an epoch, from its end, and from behind it; the last update of an epoch is a short one."""
    other = theirs(tmp_path / "theirs", bert(), token_rows(18), **CASES[name])
    last = other.state.global_step
    for step in sorted({1, last // 2, last // 2 + 1, last - 1}):
        mine = ours(
            tmp_path / f"ours-{step}",
            bert(),
            token_rows(18),
            str(tmp_path / "theirs" / f"checkpoint-{step}"),
            **CASES[name],
        )
        assert_same_end(mine, other)


def test_tied_weights_and_sequences(tmp_path: Path) -> None:
    other = theirs(tmp_path / "theirs", llama(tied=True), text_rows(10))
    mine = ours(tmp_path / "ours", llama(tied=True), text_rows(10), str(tmp_path / "theirs" / "checkpoint-2"))
    assert_same_end(mine, other)
    assert mine.model.lm_head.weight is mine.model.model.embed_tokens.weight


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(18))


def test_streams_go_on_behind_what_was_read(tmp_path: Path) -> None:
    """The second pass over it begins with the sixth update; that the first ended with the fifth is not in its state."""
    changes = {"max_steps": 8, "accelerator_config": {"dispatch_batches": False}}
    other = transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(**options(tmp_path / "theirs", **changes)),
        train_dataset=Stream(),
    )
    other.train()
    for step in (3, 5, 7):
        start = str(tmp_path / "theirs" / f"checkpoint-{step}")
        mine = Trainer(
            model=Net(),
            args=TrainingArguments(**options(tmp_path / f"ours-{step}", **changes)),
            train_dataset=Stream(),
        )
        if step == 5:
            with pytest.raises(DataError, match="ends at or before sample 20"):
                mine.train(resume_from_checkpoint=start)
            continue
        mine.train(resume_from_checkpoint=start)
        assert_same_end(mine, other)


@pytest.mark.dist
def test_ranks_continue_it_together(tmp_path: Path) -> None:
    """Two processes of half the batch, replicated and sharded."""
    other = theirs(tmp_path / "theirs", Net(), rows(18))
    save_weights(tmp_path, other.model.state_dict(), name="end.safetensors")
    on_ranks(2, continuing_ranks.main, tmp_path)


def test_the_optimizer_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Continued from its last checkpoint, there is nothing left to do."""
    other = theirs(tmp_path / "theirs", bert(), token_rows(8))
    step = other.state.global_step
    mine = ours(tmp_path / "ours", bert(), token_rows(8), str(tmp_path / "theirs" / f"checkpoint-{step}"))
    names = {id(p): name for name, p in mine.model.named_parameters()}
    state = {names[id(p)]: entry for p, entry in mine.optimizer.state.items()}
    for name, parameter in other.model.named_parameters():
        for key, value in other.optimizer.state[parameter].items():
            assert torch.equal(state[name][key], value), (name, key)
    assert mine.state.log_history[: len(other.state.log_history) - 1] == other.state.log_history[:-1]


def test_counts_of_updates_that_are_plain_numbers_go_on(tmp_path: Path) -> None:
    """As releases of torch before 1.12 saved them."""
    other = theirs(tmp_path / "theirs", bert(), token_rows(8))
    start = tmp_path / "theirs" / "checkpoint-2"
    adam = torch.load(start / "optimizer.pt", weights_only=True)
    for entry in adam["state"].values():
        entry["step"] = int(entry["step"])
    torch.save(adam, start / "optimizer.pt")
    assert_same_end(ours(tmp_path / "ours", bert(), token_rows(8), str(start)), other)


def test_groups_that_decay_otherwise_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs(tmp_path / "theirs", Normed(), rows(16))
    with caplog.at_level(logging.WARNING):
        mine = ours(tmp_path / "ours", Normed(), rows(16), str(tmp_path / "theirs" / "checkpoint-3"))
    assert mine.state.global_step == 8
    assert "another weight_decay for some parameters of one group" in caplog.text
    assert "between.weight" in caplog.text


def test_the_first_save_is_ours_and_is_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The output folder of the other Trainer, with True; what is saved there next counts from then on."""
    other = theirs(tmp_path / "run", bert(), token_rows(18))
    for step in range(6, other.state.global_step + 1):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    with caplog.at_level(logging.WARNING):
        first = ours(tmp_path / "run", bert(), token_rows(18), True, max_steps=7)
    said = [record.getMessage() for record in caplog.records if record.name == CAST]
    assert any(
        "which transformers' Trainer wrote, at step 5, 0 updates into epoch 1" in text for text in said
    )
    assert first.state.global_step == 7
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        second = ours(tmp_path / "run", bert(), token_rows(18), True)
    assert not [record for record in caplog.records if record.name == CAST]
    assert second.state.global_step == other.state.global_step
    assert (tmp_path / "run" / "checkpoint-5" / "optimizer.pt").exists(), "what is not ours is not removed"


@pytest.mark.parametrize("restore", [False, True])
def test_theirs_goes_on_from_the_state_of_ours(tmp_path: Path, restore: bool) -> None:
    """Its first save looks for the flags of the control in the state that it has read."""
    mine = ours(tmp_path / "ours", bert(), token_rows(8), None, max_steps=2)
    start = tmp_path / "ours" / "checkpoint-2"
    changes = {"max_steps": 3, "restore_callback_states_from_checkpoint": restore}
    arguments = transformers.TrainingArguments(**options(tmp_path / "theirs", **changes))
    trainer = InOrder(model=bert(), args=arguments, train_dataset=token_rows(8))
    trainer.train(resume_from_checkpoint=str(start))
    assert trainer.state.global_step == 3
    assert [row for row in trainer.state.log_history if row["step"] < 3 and "loss" in row] == [
        row for row in mine.state.log_history if "loss" in row
    ]
    back = ours(
        tmp_path / "back", bert(), token_rows(8), str(tmp_path / "theirs" / "checkpoint-3"), max_steps=4
    )
    assert back.state.global_step == 4


def test_a_damaged_checkpoint_of_ours_is_no_reason_to_take_theirs(tmp_path: Path) -> None:
    theirs(tmp_path / "run", bert(), token_rows(8))
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    ours(tmp_path / "run", bert(), token_rows(8), True)
    (tmp_path / "run" / "checkpoint-4" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="No valid checkpoint found"):
        ours(tmp_path / "run", bert(), token_rows(8), True)


def test_a_newer_one_that_is_not_whole_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs(tmp_path / "run", bert(), token_rows(12))
    newest = tmp_path / "run" / "checkpoint-6"
    whole = (newest / "optimizer.pt").read_bytes()
    (newest / "optimizer.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"checkpoint-6/optimizer\.pt cannot be read"):
        ours(tmp_path / "other", bert(), token_rows(12), str(newest))
    with caplog.at_level(logging.WARNING):
        ours(tmp_path / "run", bert(), token_rows(12), True)
    assert "newer folders were skipped" in caplog.text
    assert "checkpoint-6/optimizer.pt" in caplog.text


def test_the_best_model_may_be_theirs(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    folder = tmp_path / "theirs"
    other = InOrder(
        model=bert(), args=transformers.TrainingArguments(**options(folder, **changes)),
        train_dataset=token_rows(8), eval_dataset=token_rows(8),
    )  # fmt: skip
    other.train()
    best = folder / "checkpoint-1"
    for step in (1, 2):
        state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
        state |= {"best_metric": -1.0, "best_global_step": 1, "best_model_checkpoint": str(best)}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    mine = OursInOrder(
        model=bert(), args=TrainingArguments(**options(tmp_path / "ours", **changes)),
        train_dataset=token_rows(8), eval_dataset=token_rows(8),
    )  # fmt: skip
    mine.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    reference = transformers.BertForSequenceClassification.from_pretrained(best)
    assert mine.state.best_metric == -1.0
    for got, wanted in zip(mine.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_pickled_and_split_weights(tmp_path: Path) -> None:
    other = theirs(tmp_path / "theirs", llama(), text_rows(8))
    start = tmp_path / "theirs" / "checkpoint-2"
    state = {**transformers.LlamaForCausalLM.from_pretrained(start).state_dict()}
    (start / "model.safetensors").rename(tmp_path / "away")
    torch.save(state, start / "pytorch_model.bin")
    assert_same_end(ours(tmp_path / "bin", llama(), text_rows(8), str(start)), other)
    (start / "pytorch_model.bin").unlink()
    halves = list(state)[::2], list(state)[1::2]
    places = {}
    for number, names in enumerate(halves):
        torch.save({name: state[name] for name in names}, start / f"pytorch_model-{number}.bin")
        places |= dict.fromkeys(names, f"pytorch_model-{number}.bin")
    (start / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same_end(ours(tmp_path / "bins", llama(), text_rows(8), str(start)), other)
    for number in range(2):
        (start / f"pytorch_model-{number}.bin").unlink()
    (start / "pytorch_model.bin.index.json").unlink()
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs" / "checkpoint-1").save_pretrained(
        tmp_path / "split", max_shard_size="5KB"
    )
    assert (tmp_path / "split" / "model.safetensors.index.json").exists()
    for path in (tmp_path / "split").glob("model*"):
        shutil.copy(path, start / path.name)
    mine = ours(tmp_path / "split-run", llama(), text_rows(8), str(start), max_steps=2)
    first = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs" / "checkpoint-1")
    for got, wanted in zip(mine.model.parameters(), first.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_other_arguments_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs(tmp_path / "theirs", bert(), token_rows(16))
    start = str(tmp_path / "theirs" / "checkpoint-2")
    with caplog.at_level(logging.WARNING):
        ours(tmp_path / "rate", bert(), token_rows(16), start, learning_rate=0.5)
    assert (
        "the learning rate of update 2 is 0.5 by this run's arguments, which are used, and 0.01 by"
        in caplog.text
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        mine = ours(tmp_path / "size", bert(), token_rows(16), start, per_device_train_batch_size=2)
    assert "made 2 updates in 0.5 epochs, and an epoch has 8 here" in caplog.text
    assert mine.state.global_step == 2 + 4 + 8, "behind half of the first epoch"


def test_schedulers_of_the_script_go_on_from_their_own_count(tmp_path: Path) -> None:
    def parts(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    ends = []
    for package, base, resume in ((transformers, InOrder, None), (windlass, OursInOrder, "checkpoint-3")):
        model = bert()
        trainer = base(
            model=model, args=package.TrainingArguments(**options(tmp_path / package.__name__)),
            train_dataset=token_rows(16), optimizers=parts(model),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / "transformers" / resume))
        ends.append(trainer)
    assert_same_end(ends[1], ends[0])


def prepared(tmp_path: Path) -> Path:
    theirs(tmp_path / "theirs", bert(), token_rows(8), max_steps=2)
    return tmp_path / "theirs" / "checkpoint-2"


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    start = prepared(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is the state of another optimizer.*momentum"):
        ours(tmp_path / "sgd", bert(), token_rows(8), str(start), optim="sgd")
    with pytest.raises(CheckpointError, match=r"checkpoint-2.* does not fit this"):
        ours(tmp_path / "model", llama(), text_rows(8), str(start))
    frozen = bert()
    frozen.classifier.requires_grad_(False)
    with pytest.raises(
        CheckpointError, match=r"optimizer\.pt is the state of an optimizer with groups of \[11, 14\]"
    ):
        ours(tmp_path / "frozen", frozen, token_rows(8), str(start))
    adam = torch.load(start / "optimizer.pt", weights_only=True)
    second = adam["state"][3].pop("exp_avg_sq")
    torch.save(adam, start / "optimizer.pt")
    with pytest.raises(
        CheckpointError, match=r"optimizer\.pt is malformed: .* lacks exp_avg_sq, which AdamW"
    ):
        ours(tmp_path / "moment", bert(), token_rows(8), str(start))
    adam["state"][3]["exp_avg_sq"] = second
    for group in adam["param_groups"]:  # as an Adam saves it, whose other options are those of AdamW
        group["decoupled_weight_decay"] = False
    torch.save(adam, start / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"of another optimizer.*decoupled_weight_decay=False.*=True"):
        ours(tmp_path / "adam", bert(), token_rows(8), str(start))
    (start / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing .*Start a new run from its weights"):
        ours(tmp_path / "model-only", bert(), token_rows(8), str(start))


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "latest", "optimizer.bin"])
def test_other_layouts_are_refused(name: str, tmp_path: Path) -> None:
    start = prepared(tmp_path)
    (start / name).mkdir()
    with pytest.raises(CheckpointError, match=f"cannot be continued: .*{name} is"):
        ours(tmp_path / "ours", bert(), token_rows(8), str(start))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_step": "2"}, "global_step is a str"), ({"global_step": -1}, "negative"),
        ({"global_step": True}, "global_step is a bool"), ({"log_history": {}}, "log_history is a dict"),
        ({"log_history": [1]}, "no rows"), ({"epoch": "1"}, "epoch is a str"),
    ],
)  # fmt: skip
def test_a_malformed_state_is_one_clear_error(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    from windlass.compat.readers.transformers_checkpoint import open_checkpoint

    state = {"global_step": 2, "epoch": 1.0, "log_history": [], **change}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path, Files())


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    from windlass.compat.readers.transformers_checkpoint import scaler_state
    from windlass.precision.scaler import LossScaler

    theirs_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    state = {
        "scale": 128.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    theirs_scaler.load_state_dict(state)
    torch.save(theirs_scaler.state_dict(), tmp_path / "scaler.pt")
    ours_scaler = LossScaler(torch.device("cpu"))
    with open_torch_file(tmp_path / "scaler.pt", Files()) as file:
        ours_scaler.load_state_dict(scaler_state(file.tree))
    assert float(ours_scaler.scale(torch.ones(()))) == 128.0
    assert int(ours_scaler.state_dict()["growth_streak"]) == 7
    assert scaler_state(None) == {}
    with pytest.raises(CheckpointError, match=r"scaler\.pt"):
        scaler_state({"scale": {}, "_growth_tracker": 7})


def test_adapters_go_on_above_the_same_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="puts adapters on a model")

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0
        )
        return peft.get_peft_model(llama(), config)

    other = theirs(tmp_path / "theirs", adapted(), text_rows(18))
    start = tmp_path / "theirs" / "checkpoint-4"
    assert (start / "adapter_model.safetensors").exists()
    mine = ours(tmp_path / "ours", adapted(), text_rows(18), str(start))
    assert_same_end(mine, other)
