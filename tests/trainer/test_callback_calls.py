"""What callbacks receive, and what they may decide."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, recorder, rows
from tests.trainer.test_losses import samples, trainer_for

from windlass import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    MetricsLogCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
)
from windlass.callbacks.handler import CallbackHandler
from windlass.callbacks.samples_log import SamplesLog
from windlass.core.events import EVENTS


def test_every_event_of_a_run_and_what_comes_with_it(tmp_path: Path) -> None:
    watching = recorder()
    trainer = Trainer(
        Net(),
        arguments(
            tmp_path,
            gradient_accumulation_steps=2,
            max_steps=2,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=1,
        ),
        train_dataset=rows(16),
        eval_dataset=rows(6),
        callbacks=[watching],
    )
    trainer.train()
    trainer.predict(rows(5))
    step = [
        "on_step_begin",
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
        "on_log",
    ]
    evaluation = ["on_prediction_step", "on_prediction_step", "on_log", "on_evaluate"]
    assert [event for event, _ in watching.seen] == [
        "on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, "on_epoch_end", *evaluation, "on_save",
        "on_log", "on_train_end", "on_prediction_step", "on_prediction_step", "on_predict",
    ]  # fmt: skip
    assert set(EVENTS) - set(watching.given) == {"on_push_begin"}
    for event in set(watching.given) - {"on_init_end"}:
        given = watching.given[event]
        assert given["model"] is trainer.model, event
        assert given["optimizer"] is trainer.optimizer, event
        assert given["lr_scheduler"] is trainer.lr_scheduler, event
        assert given["train_dataloader"].total_batch_size == 4, event
        assert given["processing_class"] is None, event
    assert watching.given["on_evaluate"]["eval_dataloader"] is not None
    assert "eval_loss" in watching.given["on_evaluate"]["metrics"]
    assert "test_loss" in watching.given["on_predict"]["metrics"]


def _dict(control: TrainerControl, flag: str) -> Any:
    return {flag: True}


def _mutate(control: TrainerControl, flag: str) -> Any:
    setattr(control, flag, True)


def _return(control: TrainerControl, flag: str) -> Any:
    setattr(control, flag, True)
    return control


def _replace(control: TrainerControl, flag: str) -> Any:
    return TrainerControl(**{flag: True})


@pytest.mark.parametrize("answer", [_dict, _mutate, _return, _replace])
def test_a_callback_decides_in_four_ways(tmp_path: Path, answer: Any) -> None:
    class Decides(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 2:
                return answer(control, "should_save")
            if state.global_step == 3:
                return answer(control, "should_evaluate")
            return answer(control, "should_training_stop") if state.global_step == 5 else None

    watching = recorder()
    trainer = Trainer(
        Net(), arguments(tmp_path, max_steps=9), train_dataset=rows(40), eval_dataset=rows(4),
        callbacks=[Decides, watching],
    )  # fmt: skip
    assert trainer.train().global_step == 5
    assert ("on_save", 2) in watching.seen
    assert ("on_evaluate", 3) in watching.seen
    assert (tmp_path / "checkpoint-2").is_dir()


def test_ending_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    class Skips(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return {"should_epoch_stop": state.global_step == 1}

    watching = recorder()
    trainer = Trainer(
        Net(), arguments(tmp_path, max_steps=-1, num_train_epochs=2), train_dataset=rows(12),
        callbacks=[Skips(), watching],
    )  # fmt: skip
    assert trainer.train().global_step == 4
    assert [step for event, step in watching.seen if event == "on_epoch_end"] == [1, 4]


def test_a_callback_of_transformers_works(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    watching = recorder(transformers.TrainerCallback)
    trainer = Trainer(
        Net(),
        arguments(
            tmp_path,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            metric_for_best_model="loss",
            load_best_model_at_end=True,
            learning_rate=0.0,
        ),
        train_dataset=rows(40),
        eval_dataset=rows(4),
        callbacks=[watching, transformers.EarlyStoppingCallback(early_stopping_patience=3)],
    )
    assert trainer.train().global_step == 4  # the first is the best, then three that are no better
    assert ("on_train_end", 4) in watching.seen


def test_own_early_stopping(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(),
        arguments(
            tmp_path,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="loss",
            greater_is_better=False,
            learning_rate=0.0,
        ),
        train_dataset=rows(40),
        eval_dataset=rows(4),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert trainer.train().global_step == 3


def test_add_pop_remove(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(Net(), arguments(tmp_path))
    assert trainer.pop_callback(ProgressCallback) is None
    first = recorder()
    trainer.add_callback(first)
    assert trainer.pop_callback(first) is first
    assert trainer.pop_callback(first) is None
    assert isinstance(trainer.pop_callback(PrinterCallback), PrinterCallback)
    trainer.remove_callback(DefaultFlowCallback)
    assert [type(c) for c in trainer.callback_handler.callbacks] == [MetricsLogCallback, SamplesLog]


@pytest.mark.parametrize("quiet", [True, False])
def test_the_printer_stands_in_for_the_bar(tmp_path: Path, quiet: bool, capsys: Any) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, disable_tqdm=quiet, logging_steps=2), train_dataset=rows(16))
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert (PrinterCallback in kinds) == quiet
    assert (ProgressCallback in kinds) == (not quiet)
    trainer.train()
    said = capsys.readouterr().out
    assert ("{'loss':" in said) == quiet
    assert "\r" not in said


def test_a_run_that_fails_closes_its_bar(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a callback's own fault")

    closed: list[int] = []

    class Watched(ProgressCallback):
        def close(self) -> None:
            super().close()
            closed.append(1)
            assert self._training is None

    trainer = Trainer(
        Net(), arguments(tmp_path, disable_tqdm=True), train_dataset=rows(16), callbacks=[Watched(), Fails]
    )
    with pytest.raises(RuntimeError, match="own fault") as caught:
        trainer.train()
    assert any("Fails.on_step_end" in note for note in caught.value.__notes__)
    assert len(closed) == 2  # as training began, and after it failed
    assert not trainer.is_in_train
    trainer.remove_callback(Fails)
    assert trainer.train().global_step == 4


def test_everything_is_there_before_training(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(8))
    assert trainer.accelerator.num_processes == 1
    assert trainer.accelerator.device == next(trainer.model.parameters()).device == trainer.args.device
    assert trainer.callback_handler.model is trainer.model is trainer.model_wrapped
    assert trainer.state.global_step == 0
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert not tmp_path.joinpath("checkpoint-4").exists()


@pytest.mark.dist
def test_what_one_rank_asks_for_all_do(folder: Path) -> None:
    assert on_ranks(2, main, folder, timeout=100) == [[2, [2], [0, 1, 2]]] * 2
    assert [path.name for path in (folder / "run").glob("checkpoint-*")] == ["checkpoint-1"]


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", "0"))


class Asking(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 1
        control.should_evaluate |= state.global_step == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class AtTheBeginning(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class AtTheSecondEpoch(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.epoch == 1


class AtTheEndOfAnEpoch(TrainerCallback):
    """A run that is resumed at its last update has nothing to train before."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = True


def before_the_first_update(folder: Path) -> list[int]:
    stopped = trainer_for(folder / "stopped", max_steps=6, ddp_timeout=30)
    saves = {"save_strategy": "steps", "num_train_epochs": 1, "max_steps": -1}
    trainer_for(folder / "saved", ddp_timeout=30, **saves).train()
    resumed = trainer_for(folder / "saved", eval_dataset=samples(5), ddp_timeout=30, **saves)
    one_epoch = trainer_for(
        folder / "epoch", data=samples(8), num_train_epochs=3, max_steps=-1, ddp_timeout=30
    )
    if RANK == 1:
        one_epoch.add_callback(AtTheSecondEpoch)
        stopped.add_callback(AtTheBeginning)
        resumed.add_callback(AtTheEndOfAnEpoch)
    stopped.train()
    resumed.train(resume_from_checkpoint=True)
    one_epoch.train()
    evaluated = sum("eval_loss" in row for row in resumed.state.log_history)
    return [stopped.state.global_step, evaluated, one_epoch.state.global_step]


def main(folder: Path) -> list[Any]:
    early = before_the_first_update(folder)
    trainer = trainer_for(folder / "run", max_steps=6, eval_dataset=samples(5), ddp_timeout=30)
    if RANK == 1:
        trainer.add_callback(Asking)
    trainer.train()
    logged = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    trainer.end()
    return [trainer.state.global_step, logged, early]


class NamingHandler(CallbackHandler):
    """Gives its callbacks one argument more, as trainers with a second model do."""

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return super().call_event(event, args, state, control, second="model", **kwargs)


def test_a_script_replaces_the_handler(tmp_path: Path) -> None:
    watching = recorder()
    args = arguments(tmp_path, max_steps=2, logging_steps=1)
    trainer = Trainer(Net(), args, train_dataset=rows(16), callbacks=[watching])
    old = trainer.callback_handler
    trainer.callback_handler = NamingHandler(
        old.callbacks, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    )
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history] == [1, 2, 2], (
        "the flow is that of the callbacks"
    )
    assert {watching.given[event]["second"] for event in ("on_train_begin", "on_step_end", "on_log")} == {
        "model"
    }
    assert watching.given["on_step_end"]["optimizer"] is trainer.optimizer
