from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import integration_utils as reference

from windlass import Trainer, TrainingArguments
from windlass.callbacks.tracker import GeneralTracker
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS
from windlass.callbacks.tracking import TrackingCallback
from windlass.compat import tracker_callbacks as ours


def test_every_tracker_with_a_callback_of_the_reference_has_one_here() -> None:
    assert ours.INTEGRATION_TO_CALLBACK.keys() <= LOGGER_TYPE_TO_CLASS.keys()
    for name, cls in ours.INTEGRATION_TO_CALLBACK.items():
        assert cls.__name__ == reference.INTEGRATION_TO_CALLBACK[name].__name__


class Own(GeneralTracker):
    name = "wandb"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        return self


def test_the_callback_of_a_single_tracker_counts_as_its_class() -> None:
    assert isinstance(TrackingCallback(Own()), ours.WandbCallback)
    assert not isinstance(TrackingCallback(Own()), ours.MLflowCallback)
    assert not isinstance(TrackingCallback([Own(), Own()]), ours.WandbCallback)
    assert not isinstance(object(), ours.WandbCallback)


def test_a_script_adds_and_removes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    args = TrainingArguments(str(tmp_path), report_to=["tensorboard"])
    trainer = Trainer(torch.nn.Linear(1, 1), args)
    assert trainer.pop_callback(ours.TensorBoardCallback) is not None
    assert trainer.pop_callback(ours.TensorBoardCallback) is None
    trainer.add_callback(ours.TensorBoardCallback)
    trainer.remove_callback(ours.TensorBoardCallback)
    assert not any(isinstance(one, TrackingCallback) for one in trainer.callback_handler.callbacks)


def test_a_subclass_extends_setup_and_uses_the_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class Texts(ours.TensorBoardCallback):
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            assert self.tb_writer is None
            assert not self._initialized
            super().setup(args, state, model, **kwargs)
            assert self._initialized
            self.tb_writer.add_text("about", type(model).__name__)

    args = TrainingArguments(
        str(tmp_path), report_to="none", max_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    texts = Texts()
    Trainer(Regression(), args, train_dataset=[{"x": 1.0}], callbacks=[texts]).train()
    assert type(texts.tb_writer).__name__ == "SummaryWriter"
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert any(b"Regression" in file.read_bytes() for file in files)
    texts.tb_writer.close()


def test_subclasses_reach_the_package(tmp_path: Path) -> None:
    """As the guide of W&B does, to add tables to a run."""
    wandb = pytest.importorskip("wandb")
    assert ours.WandbCallback()._wandb is wandb


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((x - self.weight) ** 2).mean()}


def test_an_open_writer_receives_the_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    args = TrainingArguments(
        str(tmp_path / "out"),
        report_to="none",
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    writer = SummaryWriter(str(tmp_path / "events"))
    data: Any = [{"x": torch.ones(1)} for _ in range(8)]
    trainer = Trainer(Regression(), args, train_dataset=data, callbacks=[ours.TensorBoardCallback(writer)])
    trainer.train()
    writer.flush()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert isinstance(trainer.pop_callback(ours.TensorBoardCallback), ours.TensorBoardCallback)
    writer.close()


def test_logs_are_grouped_as_by_the_reference() -> None:
    logs = {"loss": 1, "eval_loss": 2, "test_f1": 3, "epoch": 4, "evaluation": 5, "eval_a_b": 6}
    assert ours.rewrite_logs(logs) == reference.rewrite_logs(logs)


def test_the_folder_has_the_form_of_the_reference() -> None:
    digits = re.compile(r"\d")
    assert digits.sub("0", ours.default_logdir())[:24] == digits.sub("0", reference.default_logdir())[:24]


def test_callbacks_are_found_by_name() -> None:
    assert ours.get_reporting_integration_callbacks(["wandb", "mlflow"]) == [
        ours.WandbCallback,
        ours.MLflowCallback,
    ]
    assert ours.get_reporting_integration_callbacks(None) == []
    assert ours.get_reporting_integration_callbacks("none") == []
    installed = ours.get_available_reporting_integrations()
    assert ours.get_reporting_integration_callbacks("all") == [
        ours.INTEGRATION_TO_CALLBACK[name] for name in installed if name in ours.INTEGRATION_TO_CALLBACK
    ]
    with pytest.raises(ValueError, match="'flyte': is not a tracker"):
        ours.get_reporting_integration_callbacks("flyte")
