"""What a checkpoint says of its run, and how a run finds its checkpoints again."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.test_malicious import reseal
from tests.trainer.small import Net, arguments, rows

from windlass import Adafactor, Trainer
from windlass.accelerator.saved_parts import load_in_place
from windlass.checkpoint.files import FileEntry, Files, Fingerprint
from windlass.compat.schedule_table import AdafactorSchedule
from windlass.core.errors import CheckpointError

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "metric_for_best_model": "score",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
}


def trainer_in(folder: Path, kind: type[Trainer] = Trainer, compute: Any = None, **changes: Any) -> Trainer:
    args = arguments(folder, **{"save_strategy": "steps", "save_steps": 1, **changes})
    return kind(Net(), args, train_dataset=rows(24), eval_dataset=rows(8), compute_metrics=compute)


def scores(*values: float) -> Any:
    """A `compute_metrics` that gives one value after the other, whatever the predictions."""
    left = list(values)
    return lambda prediction: {"score": left.pop(0)}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# --- plain JSON ------------------------------------------------------------------------------------------------------


class Numpy(Trainer):
    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        logs |= {"own": np.float32(0.5), "nested": {"counts": np.arange(2), "sure": np.bool_(True)}}
        super().log(logs, start_time)


def numpy_metrics(prediction: Any) -> dict[str, Any]:
    return {"score": np.float64(0.25), "count": np.int64(7), "ok": np.bool_(False)}


def test_numpy_in_metrics_and_logs_is_plain_json_that_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = trainer_in(
        tmp_path, Numpy, numpy_metrics, max_steps=2, eval_strategy="steps", eval_steps=1, logging_steps=1
    )
    trainer.train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    assert "$" not in path.read_text(), "every value is JSON's own"
    assert not path.with_suffix(".safetensors").exists()
    history = json.loads(path.read_text())["log_history"]
    assert history == transformers.TrainerState.load_from_json(str(path)).log_history
    evaluated = [row for row in history if "eval_score" in row]
    assert [row["step"] for row in evaluated] == [1, 2]
    for row in evaluated:
        assert (row["eval_score"], row["eval_count"], row["eval_ok"]) == (0.25, 7, False)
        assert (type(row["eval_count"]), type(row["eval_ok"])) == (int, bool)
    assert all(row["own"] == 0.5 and row["nested"] == {"counts": [0, 1], "sure": True} for row in history)


# --- the best, the last, and folders that move -----------------------------------------------------------------------


def test_best_and_last_remain_at_a_limit_of_one(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, compute=scores(0, 1, 9, 3, 2, 1), **{**BEST, "max_steps": 5})
    trainer.train()  # the first score is the rehearsal's
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-5"]


def test_a_moved_folder_keeps_its_best(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trainer_in(first, compute=scores(0, 9, 3, 2), **{**BEST, "max_steps": 3}).train()
    assert checkpoints(first) == ["checkpoint-1", "checkpoint-3"]
    first.rename(second)
    resumed = trainer_in(second, compute=scores(0, 4, 5), **{**BEST, "max_steps": 5})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(second / "checkpoint-1")
    assert checkpoints(second) == ["checkpoint-1", "checkpoint-5"]


def test_a_best_that_is_gone_is_said_before_the_run_not_after(tmp_path: Path) -> None:
    trainer_in(tmp_path, compute=scores(0, 9, 3, 2), **{**BEST, "max_steps": 3}).train()
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"the best checkpoint so far .*checkpoint-1.* is gone"):
        trainer_in(tmp_path, compute=scores(0, 1), **{**BEST, "max_steps": 4}).train(
            resume_from_checkpoint=True
        )
    lenient = {**BEST, "max_steps": 4, "load_best_model_at_end": False}
    trainer_in(tmp_path, compute=scores(0, 1), **lenient).train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ["checkpoint-4"]


# --- two runs in one folder ------------------------------------------------------------------------------------------


def test_a_fresh_run_in_a_used_folder_warns_once_and_is_the_one_resumed(tmp_path: Path, caplog: Any) -> None:
    trainer_in(tmp_path, max_steps=4, save_steps=4).train()
    assert not [record for record in caplog.records if "holds another run" in record.getMessage()]
    trainer_in(tmp_path, max_steps=2, save_steps=2).train()
    said = [record.getMessage() for record in caplog.records if "holds another run" in record.getMessage()]
    assert len(said) == 1
    assert "(checkpoint-4)" in said[0]
    resumed = trainer_in(tmp_path, max_steps=3, save_steps=3, save_total_limit=2, log_level="info")
    resumed.train(resume_from_checkpoint=True)
    assert any("checkpoint-2 at step 2" in record.getMessage() for record in caplog.records)
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert len([r for r in caplog.records if "holds another run" in r.getMessage()]) == 1


# --- verified once, and only what was verified -----------------------------------------------------------------------


def test_a_resume_hashes_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_in(tmp_path, max_steps=2, save_steps=2).train()
    hashed = []
    check = Files.check

    def counted(self: Files, path: Path, entry: FileEntry) -> Fingerprint:
        hashed.append(path.name)
        return check(self, path, entry)

    monkeypatch.setattr(Files, "check", counted)
    trainer_in(tmp_path, max_steps=2, save_steps=2).train(resume_from_checkpoint=True)
    listed = json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["files"]
    assert sorted(hashed) == sorted(listed)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rank-00000.json"])
def test_a_byte_flipped_between_verifying_and_loading_is_found(name: str, tmp_path: Path) -> None:
    class Flipped(Trainer):
        def get_train_dataloader(
            self,
        ) -> Any:  # called after the checkpoint was verified, before it is loaded
            path = tmp_path / "checkpoint-2" / name
            data = bytearray(path.read_bytes())
            data[-2] ^= 1
            path.write_bytes(data)
            return super().get_train_dataloader()

    trainer_in(tmp_path, max_steps=2, save_steps=2).train()
    with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
        trainer_in(tmp_path, Flipped, max_steps=3).train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer_in(folder, max_steps=2).train()
    return folder


PARTS = ["loop", "schedule", "executor", "best", "trainer_state", "rank-00000", "optimizer"]
CONTENTS = [{}, {"epoch": "x", "step": "x"}, {"evaluations": 3, "ledger": {}, "position": {}}]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_holds_something_else_is_named(part: str, saved: Path, tmp_path: Path) -> None:
    """Written by another program, with a manifest that fits: nothing is taken for something that it is not."""
    for number, content in enumerate(CONTENTS):
        folder = tmp_path / f"{number}"
        shutil.copytree(saved, folder)
        (folder / "checkpoint-2" / f"{part}.json").write_text(json.dumps(content))
        reseal(folder / "checkpoint-2")
        with pytest.raises(CheckpointError, match=rf"checkpoint-2|{part} state"):
            trainer_in(folder, max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "size", [3, {"samples": 4}, {"micro": "4", "accumulation": 1, "world": 1, "asked": 1}]
)
def test_a_size_of_updates_that_is_none_is_refused(size: Any, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    reseal(tmp_path / "run" / "checkpoint-2", lambda body: body["meta"].update(update_size=size))
    with pytest.raises(CheckpointError, match=r"manifest\.json does not hold"):
        trainer_in(tmp_path / "run", max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_metric", [1]), ("stateful_callbacks", 1.5), ("total_flos", {}), ("log_history", [1]), ("global_step", 1)],
)  # fmt: skip
def test_a_state_of_other_types_is_refused(name: str, value: Any, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    path = folder / "checkpoint-2" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    reseal(path.parent)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        trainer_in(folder, max_steps=3).train(resume_from_checkpoint=True)


class Unwritable(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer: Any) -> None:
        self.helper = object()
        super().__init__(optimizer, lambda step: 1.0)


class Unreadable:
    def state_dict(self) -> dict[str, Any]:
        return {"helper": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("which", ["lr_scheduler", "register_for_checkpointing"])
def test_a_state_that_cannot_be_written_is_refused_before_the_first_update(
    which: str, tmp_path: Path
) -> None:
    for strategy in ("steps", "no"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = Unwritable(optimizer) if which == "lr_scheduler" else None
        args = arguments(tmp_path / strategy, save_strategy=strategy, save_steps=2)
        trainer = Trainer(model, args, train_dataset=rows(16), optimizers=(optimizer, scheduler))
        if scheduler is None:
            trainer.accelerator.register_for_checkpointing(Unreadable())
        if strategy == "no":
            trainer.train()
            continue
        with pytest.raises(
            CheckpointError, match=rf"{which}=.*'helper' is a builtins.object.*save_strategy='no'"
        ):
            trainer.train()
        assert trainer.state.global_step == 0


def test_a_configuration_that_cannot_be_written_is_refused_before_the_first_update(
    tmp_path: Path, caplog: Any
) -> None:
    """transformers checks settings of generation when it writes them, which would cost the run at its first save; one
    without saves is warned, for its script may call save_model.
    """
    model: Any = Net()
    model.generation_config = pytest.importorskip("transformers").GenerationConfig()
    model.generation_config.temperature = 0.5
    trainer = Trainer(model, arguments(tmp_path, save_strategy="steps"), train_dataset=rows(8))
    with pytest.raises(CheckpointError, match=r"configurations of Net.*GenerationConfig is invalid"):
        trainer.train()
    assert trainer.state.global_step == 0
    caplog.set_level("WARNING", logger="windlass")
    Trainer(model, arguments(tmp_path, save_strategy="no"), train_dataset=rows(8)).train()
    assert "save_model will fail: the configurations of Net" in caplog.text


def test_a_run_with_the_schedule_that_shows_adafactors_rates_is_resumed_to_the_bit(tmp_path: Path) -> None:
    found = []
    for name, resume in (("whole", False), ("resumed", True)):
        if resume:
            ignored = shutil.ignore_patterns("checkpoint-4")
            shutil.copytree(tmp_path / "whole", tmp_path / name, ignore=ignored)
        model = Net()
        optimizer = Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)
        args = arguments(tmp_path / name, save_strategy="steps", save_steps=2, logging_steps=1)
        trainer = Trainer(
            model, args, train_dataset=rows(16), optimizers=(optimizer, AdafactorSchedule(optimizer))
        )
        trainer.train(resume_from_checkpoint=resume)
        rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        found.append((rates, model.state_dict()))
    assert len(found[0][0]) == 4
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


class Composite(torch.optim.Optimizer):
    """Hands its groups to an optimizer that has the momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("registered", [True, False])
def test_an_optimizer_in_another_one_is_resumed_to_the_bit_once_it_is_registered(
    registered: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    found = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = Net()
        optimizer = Composite(model.parameters())
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, lr_scheduler_type="linear")
        trainer = Trainer(model, args, train_dataset=rows(16), optimizers=(optimizer, None))
        if registered:
            trainer.accelerator.register_for_checkpointing(optimizer.base)
        trainer.train(resume_from_checkpoint=resume)
        assert optimizer.base.param_groups is optimizer.param_groups
        found.append([p.tolist() for p in model.parameters()])
    assert (found[0] == found[1]) == registered
    assert ("Composite.base is an optimizer with a state of its own" in caplog.text) != registered


class Container(torch.optim.Optimizer):
    """Shows the groups of two optimizers, and has none of its own."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts, self.defaults, self.state = parts, {}, {}  # type: ignore[assignment]

    @property
    def param_groups(self) -> Any:
        return [group for part in self.parts for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, loaded in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(loaded)


class Growing(torch.optim.SGD):
    """Its state has groups that came while it trained."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        while len(self.param_groups) < len(state["param_groups"]):
            self.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        super().load_state_dict(state)


def test_optimizers_with_groups_of_other_kinds_are_loaded_as_they_load_themselves() -> None:
    def sgd(kind: type[torch.optim.SGD] = torch.optim.SGD, lr: float = 0.1) -> torch.optim.SGD:
        return kind([torch.nn.Parameter(torch.zeros(1))], lr=lr)

    container = Container([sgd(), sgd()])
    load_in_place(container, Container([sgd(lr=0.2), sgd(lr=0.3)]).state_dict())
    assert [group["lr"] for group in container.param_groups] == [0.2, 0.3]
    saved, growing = sgd(), sgd(Growing)
    saved.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.4})
    load_in_place(growing, saved.state_dict())
    assert [group["lr"] for group in growing.param_groups] == [0.1, 0.4]
