"""Copies of `_maybe_log_save_evaluate`, as scripts have them to report more than the loss."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, rows, settings, weights_hash

import windlass
from windlass import Trainer, TrainerCallback
from windlass.core.errors import ConfigError, Preempted
from windlass.core.run_clock import run_clock


def copying(base: Any) -> Any:
    """A subclass that logs, evaluates and saves by itself, each when it is due."""

    class Copies(base):  # type: ignore[misc]
        def _maybe_log_save_evaluate(
            self,
            tr_loss: Any,
            grad_norm: Any,
            model: Any,
            trial: Any,
            epoch: Any,
            ignore_keys_for_eval: Any,
            start_time: Any,
            learning_rate: Any = None,
        ) -> None:
            control, step = self.control, self.state.global_step
            if control.should_log and step > self._globalstep_last_logged:
                total = self.accelerator.gather(tr_loss).mean().item()
                tr_loss -= tr_loss
                mean = total / (step - self._globalstep_last_logged)
                logs = {"loss": mean, "grad_norm": float(grad_norm), "perplexity": math.exp(mean)}
                self._total_loss_scalar += total
                self._globalstep_last_logged = step
                self.store_flos()
                self.log({**logs, "learning_rate": self._get_learning_rate()}, start_time)
            if control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                self._report_to_hp_search(trial, step, metrics)
                is_best = self._determine_best_metric(metrics=metrics, trial=trial)
                if self.args.save_strategy == "best":
                    control.should_save = is_best
            if control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    return Copies


class Saves(TrainerCallback):
    """Notes the steps of `on_save`, and if the checkpoint was there."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.steps.append((state.global_step, folder.is_dir()))


BASE: dict[str, Any] = {
    "max_steps": -1, "num_train_epochs": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "train_sampling_strategy": "sequential", "learning_rate": 0.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "steps": {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3},
    "epochs": {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"},
    "best": {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True},
    "plateau": {
        "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True,
        "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}, "save_total_limit": 2,
    },
}  # fmt: skip


def run_of(kind: Any, args: Any, **options: Any) -> Any:
    callbacks = [Saves()]
    trainer = kind(Net(), args, train_dataset=rows(16), eval_dataset=rows(8, seed=1), callbacks=callbacks)
    trainer.train(**options)
    trainer.saves = callbacks[0].steps
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_a_copy_does_what_it_does_in_transformers(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers", reason="whose loop calls the method")
    options = BASE | CASES[case]
    ours, theirs = (
        run_of(copying(library.Trainer), library.TrainingArguments(**settings(tmp_path / name, **options)))
        for name, library in (("ours", windlass), ("theirs", transformers))
    )
    kept = "loss", "perplexity", "learning_rate", "eval_loss", "step"
    logged, expected = (
        [{name: row[name] for name in kept if name in row} for row in one.state.log_history]
        for one in (ours, theirs)
    )
    assert logged == [pytest.approx(row, rel=1e-5) for row in expected]
    assert any("perplexity" in row for row in logged)
    assert ours.saves == theirs.saves
    assert all(is_there for _, is_there in ours.saves)
    folders = [
        sorted(path.name for path in (tmp_path / name).glob("checkpoint-*")) for name in ("ours", "theirs")
    ]
    assert folders[0] == folders[1]
    if "metric_for_best_model" in options:
        assert ours.state.best_metric == pytest.approx(theirs.state.best_metric, rel=1e-5)
        assert ours.state.best_global_step == theirs.state.best_global_step


def test_an_epoch_s_last_step_is_saved_once(tmp_path: Path) -> None:
    """It is the best there, and the epoch's end follows with the same evaluation."""
    options = BASE | CASES["plateau"] | {"greater_is_better": False}
    saves = run_of(copying(Trainer), arguments(tmp_path, **options)).saves
    assert [step for step, _ in saves] == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize("case", ["steps", "plateau"])
def test_a_resumed_run_ends_with_the_same_bits_and_reports(tmp_path: Path, case: str) -> None:
    args = arguments(
        tmp_path, **BASE | CASES[case] | {"load_best_model_at_end": False, "save_total_limit": None}
    )
    whole = run_of(copying(Trainer), args)
    resumed = run_of(copying(Trainer), args, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    reports = [
        [row for row in one.state.log_history if "loss" in row or "eval_loss" in row]
        for one in (whole, resumed)
    ]
    timeless = [
        [{k: v for k, v in row.items() if "per_second" not in k and "runtime" not in k} for row in one]
        for one in reports
    ]
    assert timeless[0] == timeless[1]


def test_the_best_are_kept_where_it_saves_at_other_steps(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 8, "keep_best": 2, "metric_for_best_model": "loss"}
    run_of(copying(Trainer), arguments(tmp_path / "copied", **BASE | options))
    run_of(Trainer, arguments(tmp_path / "plain", **BASE | options))
    copied, plain = (sorted(p.name for p in (tmp_path / n).glob("checkpoint-*")) for n in ("copied", "plain"))
    assert copied == plain
    assert len(plain) >= 2


class Requests(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("save_steps", [3, 100])
def test_a_scheduler_s_signal_is_followed_whether_it_saved_or_not(tmp_path: Path, save_steps: int) -> None:
    options = BASE | {"save_strategy": "steps", "save_steps": save_steps}
    whole = run_of(copying(Trainer), arguments(tmp_path / "whole", **options))
    args = arguments(tmp_path / "left", **options)
    left = copying(Trainer)(
        Net(), args, train_dataset=rows(16), eval_dataset=rows(8, seed=1), callbacks=[Requests()]
    )
    with pytest.raises(Preempted) as caught:
        left.train()
    assert caught.value.step == 3
    resumed = run_of(copying(Trainer), args, resume_from_checkpoint=True)
    assert resumed.saves[0][0] > 3
    assert weights_hash(resumed.model) == weights_hash(whole.model)


def test_the_clock_s_checkpoints_are_made_beside_it(tmp_path: Path) -> None:
    saves = run_of(copying(Trainer), arguments(tmp_path, **BASE, save_strategy="no", save_every=0.001)).saves
    assert len(saves) > 1


def test_the_time_of_its_evaluations_and_saves_is_counted_as_that(tmp_path: Path) -> None:
    counted: dict[str, set[str]] = {"evaluation": set(), "save": set()}

    def metrics(predictions: Any) -> dict[str, float]:
        counted["evaluation"].add(run_clock().read().kind)
        return {}

    class Exports(TrainerCallback):
        def state(self) -> dict[str, Any]:
            counted["save"].add(run_clock().read().kind)
            return {"args": {}, "attributes": {}}

    args = arguments(tmp_path, **BASE | {"save_strategy": "steps", "save_steps": 4})
    data: dict[str, Any] = {"train_dataset": rows(16), "eval_dataset": rows(8, seed=1)}
    copying(Trainer)(Net(), args, **data, compute_metrics=metrics, callbacks=[Exports()]).train()
    assert counted == {kind: {kind} for kind in counted}


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process")
@pytest.mark.parametrize("save_steps", [4, 100])
def test_ctrl_c_ends_the_run_with_one_checkpoint(tmp_path: Path, save_steps: int) -> None:
    class Presses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                signal.raise_signal(signal.SIGINT)

    saves = Saves()
    args = arguments(tmp_path, **BASE | {"save_strategy": "steps", "save_steps": save_steps})
    data: dict[str, Any] = {"train_dataset": rows(16), "eval_dataset": rows(8, seed=1)}
    stopped = copying(Trainer)(Net(), args, **data, callbacks=[Presses(), saves])
    assert stopped.train().global_step == 4
    assert saves.steps == [(4, True)]


def test_what_it_leaves_undone_is_not_done(tmp_path: Path) -> None:
    class LogsOnly(Trainer):
        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
            if self.control.should_log:
                self.log({"own": float(tr_loss)})

    trainer = run_of(LogsOnly, arguments(tmp_path, **BASE | {"save_strategy": "steps", "save_steps": 4}))
    assert not any("eval_loss" in row for row in trainer.state.log_history)
    assert [row["step"] for row in trainer.state.log_history if "own" in row] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert not trainer.saves


def test_one_that_saves_in_its_own_way_fires_on_save_once(tmp_path: Path) -> None:
    class Own(copying(Trainer)):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Path(self.args.output_dir, f"checkpoint-{self.state.global_step}").mkdir()

    trainer = run_of(Own, arguments(tmp_path, **BASE | {"save_strategy": "steps", "save_steps": 4}))
    assert trainer.saves == [(step, True) for step in (4, 8, 12, 16)]


def test_one_that_other_arguments_are_passed_to_is_refused(tmp_path: Path) -> None:
    class Older(Trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore: Any
        ) -> None:  # type: ignore[override]
            raise AssertionError

    trainer = Older(Net(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match=r"_maybe_log_save_evaluate='overridden'.*start_time"):
        trainer.train()


def copied_on_ranks(folder: str) -> tuple[Any, list[Any], list[Any]]:
    args = arguments(Path(folder), **BASE | CASES["plateau"])
    trainer = run_of(copying(Trainer), args)
    logged = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    return weights_hash(trainer.model), logged, trainer.saves


@pytest.mark.dist
def test_two_ranks_do_the_same_work(tmp_path: Path) -> None:
    first, second = on_ranks(2, copied_on_ranks, str(tmp_path))
    assert first == second
    assert len(first[1]) == 4
    assert [step for step, _ in first[2]] == [2, 4, 6, 8]


def leave_on_ranks(folder: str, copied: bool) -> int:
    """The last rank alone gets the signal, at a step that the copy saves."""
    # An evaluation of a copy does not exchange signals.
    options = BASE | {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    args = arguments(Path(folder), **options)
    data: dict[str, Any] = {"train_dataset": rows(64), "eval_dataset": rows(8, seed=1)}
    trainer = (copying(Trainer) if copied else Trainer)(Net(), args, **data)
    if trainer.accelerator.process_index == 1:
        trainer.add_callback(Requests())
    with pytest.raises(Preempted) as caught:
        trainer.train()
    return caught.value.step


@pytest.mark.dist
def test_ranks_leave_together_where_it_saved(tmp_path: Path) -> None:
    copied, plain = (
        on_ranks(2, leave_on_ranks, str(tmp_path / f"{copied}"), copied) for copied in (True, False)
    )
    assert copied == plain
    assert copied[0] == copied[1]
