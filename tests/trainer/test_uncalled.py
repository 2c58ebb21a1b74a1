"""Overrides of the loop's own methods: those that call what they override, and copies of other loops."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, rows, settings, weights_hash

import windlass
from windlass import Trainer, TrainerCallback
from windlass.core.errors import ConfigError
from windlass.trainer.uncalled import CALLED_AROUND

# --- the loop -----------------------------------------------------------------------------------------------------


class Around(Trainer):
    """Sets an argument before training, and notes what it got and what came back."""

    def _inner_training_loop(self, **kwargs: Any) -> Any:
        self.notes = [kwargs]
        self.args.max_steps = 5
        try:
            result = super()._inner_training_loop(**kwargs)
        finally:
            self.notes.append(self.state.global_step)
        return result


def test_an_override_around_the_loop_trains_with_what_it_sets(tmp_path: Path) -> None:
    around = Around(Net(), arguments(tmp_path / "around", max_steps=3), train_dataset=rows(8))
    plain = Trainer(Net(), arguments(tmp_path / "plain", max_steps=5), train_dataset=rows(8))
    assert around.train(ignore_keys_for_eval=["x"]).global_step == plain.train().global_step == 5
    got, step = around.notes
    assert list(got.values()) == [around.args.train_batch_size, around.args, None, None, ["x"]]
    assert step == 5
    assert weights_hash(around.model) == weights_hash(plain.model)
    assert not around.is_in_train


def test_it_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = Around(Net(), arguments(tmp_path / "whole", **options), train_dataset=rows(8))
    whole.train()
    saved = str(tmp_path / "whole" / "checkpoint-2")
    resumed = Around(Net(), arguments(tmp_path / "resumed", **options), train_dataset=rows(8))
    assert resumed.train(resume_from_checkpoint=saved).global_step == 5
    assert resumed.notes[0]["resume_from_checkpoint"] == saved
    assert weights_hash(resumed.model) == weights_hash(whole.model)


def test_what_an_override_of_the_loop_returns_is_returned(tmp_path: Path) -> None:
    class Forgets(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            super()._inner_training_loop(*args, **kwargs)

    trainer = Forgets(Net(), arguments(tmp_path, max_steps=2), train_dataset=rows(8))
    assert (trainer.train(), trainer.state.global_step) == (None, 2)


def test_an_error_that_an_override_swallows_leaves_nothing_locked(tmp_path: Path) -> None:
    class Swallows(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise ArithmeticError
            return super().training_step(*args, **kwargs)

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except ArithmeticError:
                return None

    trainer = Swallows(Net(), arguments(tmp_path), train_dataset=rows(8))
    assert trainer.train() is None
    assert (trainer.state.global_step, trainer.is_in_train) == (1, False)
    assert Trainer(Net(), arguments(tmp_path, max_steps=2), train_dataset=rows(8)).train().global_step == 2


def test_other_arguments_than_those_of_the_trainer_are_refused(tmp_path: Path) -> None:
    class Swaps(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            return super()._inner_training_loop(args=arguments(tmp_path, max_steps=9))

    with pytest.raises(ConfigError, match="has the arguments of its Trainer"):
        Swaps(Net(), arguments(tmp_path), train_dataset=rows(8)).train()


@pytest.mark.parametrize("name", sorted(CALLED_AROUND))
def test_a_copy_of_another_loop_is_refused_and_not_called(tmp_path: Path, name: str) -> None:
    def copied(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def around(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(super(outer, self), name)(*args, **kwargs)

    inner = type("Copied", (Trainer,), {name: copied})
    around.__name__ = name
    outer = type("Outer", (inner,), {name: around})
    for kind in inner, outer:
        trainer = kind(Net(), arguments(tmp_path), train_dataset=rows(8))
        with pytest.raises(ConfigError, match=f"{name}='overridden'.*super"):
            trainer.train()
        assert trainer.state.global_step == 0


class Restores(Trainer):
    """Keeps the generators that it has, if it is asked to, and notes them."""

    keeps = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        began = random.getstate()
        if not self.keeps:
            super()._load_rng_state(checkpoint)
        self.notes = [Path(checkpoint or "").name, began, random.getstate()]


class StatesAtSaves(TrainerCallback):
    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states.append(random.getstate())


def test_an_override_decides_if_generators_are_restored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    saves = StatesAtSaves()
    plain = Trainer(Net(), arguments(tmp_path, **options), train_dataset=rows(32), callbacks=[saves])
    plain.train()
    for keeps in (False, True):
        trainer = Restores(Net(), arguments(tmp_path, **options), train_dataset=rows(32))
        trainer.keeps = keeps
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        name, began, then = trainer.notes
        assert name == "checkpoint-2"
        assert began != saves.states[0]
        assert then == (began if keeps else saves.states[0])
    with pytest.raises(ConfigError, match="_load_rng_state='called'"):
        plain._load_rng_state(None)


def test_a_copy_of_another_library_is_called_once_generators_are_restored(tmp_path: Path) -> None:
    """It looks for a file of that library, and leaves them alone without one."""
    noted: list[Any] = []

    class Looks(Trainer):
        def _load_rng_state(self, checkpoint: str | None) -> None:
            assert not Path(checkpoint or "", "rng_state.pth").exists()
            noted.append((Path(checkpoint or "").name, random.getstate()))

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    saves = StatesAtSaves()
    whole = Looks(Net(), arguments(tmp_path, **options), train_dataset=rows(32), callbacks=[saves])
    whole.train()
    assert not noted, "nothing is resumed"
    random.random()
    resumed = Looks(Net(), arguments(tmp_path, **options), train_dataset=rows(32))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert noted == [("checkpoint-2", saves.states[0])]
    assert weights_hash(resumed.model) == weights_hash(whole.model)


# --- between updates ----------------------------------------------------------------------------------------------


def noting(base: Any) -> Any:
    """A subclass that notes what it is called with, and stops the run after its ninth update."""

    class Notes(base):  # type: ignore[misc]
        def _maybe_log_save_evaluate(
            self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, *args: Any, **kwargs: Any
        ) -> None:
            control, step, last = self.control, self.state.global_step, self._globalstep_last_logged
            due = control.should_log, control.should_evaluate, control.should_save
            numbers = float(tr_loss), float(grad_norm), kwargs["learning_rate"]
            self.notes.append((step, last, due, numbers, epoch, len(args)))
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, *args, **kwargs)
            if step == 9:
                control.should_training_stop = True

    return Notes


def reporting(base: Any) -> Any:
    """A subclass that reports the loss itself, and has the rest done."""

    class Reports(base):  # type: ignore[misc]
        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
            updates = self.state.global_step - self._globalstep_last_logged
            if self.control.should_log and updates:
                self.control.should_log = False
                total = float(tr_loss)
                tr_loss -= tr_loss
                self._total_loss_scalar += total
                self._globalstep_last_logged = self.state.global_step
                self.log({"loss": total / updates, "own": 1.0})
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    return Reports


OPTIONS: dict[str, Any] = {
    "max_steps": -1, "num_train_epochs": 5, "gradient_accumulation_steps": 2, "logging_steps": 2, "eval_steps": 4,
    "eval_strategy": "steps", "train_sampling_strategy": "sequential", "warmup_steps": 2,
}  # fmt: skip


def run_of(kind: Any, args: Any) -> Any:
    trainer = kind(Net(), args, train_dataset=rows(20), eval_dataset=rows(8, seed=1))
    trainer.notes = []
    trainer.train()
    return trainer


@pytest.mark.parametrize("derive", [noting, reporting])
def test_an_override_between_updates_gets_what_that_of_transformers_gets(tmp_path: Path, derive: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="whose loop calls the method")
    ours, theirs = (
        run_of(derive(library.Trainer), library.TrainingArguments(**settings(tmp_path / name, **OPTIONS)))
        for name, library in (("ours", windlass), ("theirs", transformers))
    )
    expected_notes = [(*one[:3], pytest.approx(one[3], rel=1e-5), *one[4:]) for one in theirs.notes]
    assert ours.notes == expected_notes
    kept = "loss", "own", "eval_loss", "train_loss", "step"
    logged, expected = (
        [{name: row[name] for name in kept if name in row} for row in one.state.log_history]
        for one in (ours, theirs)
    )
    assert logged == [pytest.approx(row, rel=1e-5) for row in expected]
    assert len(logged) > 5


def test_a_resumed_run_reports_the_whole_interval(tmp_path: Path) -> None:
    """The checkpoint lies between two reports, and what the script reports is a sum that it gets."""
    options = OPTIONS | {"logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    whole = run_of(reporting(Trainer), arguments(tmp_path, **options))
    resumed = reporting(Trainer)(Net(), arguments(tmp_path, **options), train_dataset=rows(20))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    rows_of = [[row for row in one.state.log_history if "loss" in row] for one in (whole, resumed)]
    assert rows_of[0] == rows_of[1]
    assert [row["step"] for row in rows_of[0]] == [3, 6, 9, 12, 15]
    assert weights_hash(whole.model) == weights_hash(resumed.model)


def test_the_step_of_the_last_report_is_set_to_the_present_one_only(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(8))
    assert trainer._globalstep_last_logged == 0
    trainer._globalstep_last_logged = 0
    with pytest.raises(ConfigError, match="_globalstep_last_logged=3"):
        trainer._globalstep_last_logged = 3


def test_a_run_alone_calls_the_work_between_updates(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match="_maybe_log_save_evaluate='called'"):
        trainer._maybe_log_save_evaluate(torch.zeros(()), None, trainer.model, None, 0, None)


class StopsOnOne(Trainer):
    """The last rank alone asks for the end, after the third update. Notes the mean of the losses that ranks got."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self.notes.append(float(self._nested_gather(tr_loss.reshape(1)).mean()))
        if self.state.global_step == 3 and self.accelerator.process_index == 1:
            self.control.should_training_stop = True


def stop_on_one(folder: str) -> tuple[int, list[float], list[float]]:
    args = arguments(Path(folder), max_steps=6, logging_steps=1)
    trainer = StopsOnOne(Net(), args, train_dataset=rows(32))
    trainer.notes = []
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.state.global_step, trainer.notes[:3], logged


@pytest.mark.dist
def test_ranks_agree_on_what_an_override_decides_on_one(tmp_path: Path) -> None:
    first, second = on_ranks(2, stop_on_one, str(tmp_path))
    assert first == second
    steps, given, logged = first
    assert steps == len(logged) == 3
    assert given == pytest.approx(logged, rel=1e-6)


def test_the_best_model_is_chosen_by_what_an_override_adds_to_an_evaluation(tmp_path: Path) -> None:
    class Adds(Trainer):
        def _evaluate(
            self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False
        ) -> dict[str, float]:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
            step = self.state.global_step
            self.notes.append((step, trial, ignore_keys_for_eval, skip_scheduler))
            return {**metrics, "eval_own": -abs(step - 4)}

    options: dict[str, Any] = {
        "max_steps": 6, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "own", "eval_on_start": True,
    }  # fmt: skip
    trainer = run_of(Adds, arguments(tmp_path, **options))
    assert trainer.notes == [(step, None, None, step == 0) for step in (0, 2, 4, 6)]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


# --- the gradients --------------------------------------------------------------------------------------------------


def clipping(base: Any) -> Any:
    """A subclass that clips the bias by itself, after all gradients were clipped together."""

    class Clips(base):  # type: ignore[misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            of_bias = model.layer.bias.grad
            self.notes.append(float(of_bias.norm()))
            norm = super()._clip_grad_norm(model)
            of_bias.clamp_(-0.01, 0.01)
            return norm

    return Clips


def assigning(base: Any) -> Any:
    """A subclass that replaces the accelerator's way to clip, and measures the weight alone."""

    class Assigns(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inherited = self.accelerator.clip_grad_norm_

            def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
                parameters = list(parameters)
                self.notes.append(float(parameters[1].grad.norm()))
                return inherited(parameters[:1], max_norm / 2, norm_type)

            self.accelerator.clip_grad_norm_ = clip

    return Assigns


def replacing(base: Any) -> Any:
    """A subclass that clips without what it overrides."""

    class Replaces(base):  # type: ignore[misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            return torch.nn.utils.clip_grad_norm_([model.layer.weight], 0.2)

    return Replaces


CLIPPED: dict[str, Any] = {
    "max_steps": 4, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential",
    "logging_steps": 1, "optim": "sgd",
}  # fmt: skip


@pytest.mark.parametrize("derive", [clipping, assigning, replacing])
def test_gradients_are_clipped_in_the_scripts_own_way(tmp_path: Path, derive: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="whose loop calls the method")
    ours, theirs = (
        run_of(derive(library.Trainer), library.TrainingArguments(**settings(tmp_path / name, **CLIPPED)))
        for name, library in (("ours", windlass), ("theirs", transformers))
    )
    plain = run_of(Trainer, arguments(tmp_path / "plain", **CLIPPED))
    assert ours.notes == pytest.approx(theirs.notes, rel=1e-5)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert weights_hash(ours.model) != weights_hash(plain.model)
    norms = [
        [row["grad_norm"] for row in one.state.log_history if "grad_norm" in row] for one in (ours, plain)
    ]
    # Of all gradients, before anything clips them.
    assert norms[0][0] == norms[1][0]


def clip_on_ranks(folder: str) -> tuple[list[float], list[float]]:
    trainer = clipping(Trainer)(Net(), arguments(Path(folder), **CLIPPED), train_dataset=rows(32))
    trainer.notes = []
    trainer.train()
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    return trainer.notes, [float(value) for value in unwrapped.layer.bias]


@pytest.mark.dist
def test_under_data_parallelism_gradients_are_those_of_all_processes(tmp_path: Path) -> None:
    first, second = on_ranks(2, clip_on_ranks, str(tmp_path))
    assert first == second
    assert len(first[0]) == 4


@pytest.mark.parametrize("derive", [clipping, assigning])
def test_where_gradients_are_not_whole_the_scripts_way_to_clip_is_refused(
    tmp_path: Path, derive: Any
) -> None:
    args = arguments(tmp_path, optim="lomo")
    trainer = derive(Trainer)(Net(), args, train_dataset=rows(8))
    with pytest.raises(ConfigError, match=r"clip_grad_norm_?='overridden'.*whole on each process"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_alone_calls_the_way_to_clip(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match="_clip_grad_norm='called'"):
        trainer._clip_grad_norm(trainer.model)


# --- the model ----------------------------------------------------------------------------------------------------


def test_an_override_of_wrapping_may_change_the_model_in_place(tmp_path: Path) -> None:
    class Hooks(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            self.notes.append((training, self.is_in_train))
            return super()._wrap_model(model, training=training, dataloader=dataloader)

    trainer = run_of(Hooks, arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2))
    trainer.evaluate()
    assert trainer.notes == [(True, True), (False, True), (False, True), (False, False)]


def test_another_model_than_the_trainers_is_refused(tmp_path: Path) -> None:
    class Wraps(Trainer):
        def _wrap_model(self, model: Any, training: bool = True) -> Any:
            return torch.nn.DataParallel(model)

    trainer = Wraps(Net(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match=r"_wrap_model='returned DataParallel'.*wraps the model itself"):
        trainer.train()


def test_an_override_of_moving_the_model_is_called_in_its_place(tmp_path: Path) -> None:
    moved = []

    class Moves(Trainer):
        def _move_model_to_device(self, model: Any, device: Any) -> None:
            moved.append((model, device))

    model = Net()
    trainer = Moves(model, arguments(tmp_path, max_steps=2), train_dataset=rows(8))
    assert moved == [(model, torch.device("cpu"))]
    assert trainer.train().global_step == 2
