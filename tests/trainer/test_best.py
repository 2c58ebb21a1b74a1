"""`load_best_model_at_end`: the weights at the end are, bit for bit, those that were evaluated as the best."""

from __future__ import annotations

import errno
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.resume_cases import KILLED, in_a_child, kill
from tests.trainer.small import Net, arguments, rows, weights_hash

from windlass import Trainer, TrainerCallback
from windlass.checkpoint.files import Files
from windlass.checkpoint.store import Store
from windlass.core.errors import ConfigError


class Scripted(Trainer):
    """Evaluates to a given sequence of scores, and notes the weights that each was given for."""

    scores: list[float]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.hashes = [*getattr(self, "hashes", []), weights_hash(self.model)]
        metrics = {"eval_score": self.scores[len(self.hashes) - 1], "epoch": self.state.epoch}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def scripted(folder: Path, scores: list[float], **changes: Any) -> Scripted:
    given = {
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    given |= {"metric_for_best_model": "score", "load_best_model_at_end": True, "learning_rate": 0.1}
    trainer = Scripted(
        Net(), arguments(folder, **{**given, **changes}), train_dataset=rows(24), eval_dataset=rows(4)
    )
    trainer.scores = scores
    return trainer


def memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


scores = st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, float("nan")]), min_size=7, max_size=7)


@given(
    scores=scores,
    every=st.integers(1, 4),
    save=st.integers(1, 7),
    greater=st.booleans(),
    limit=st.sampled_from([None, 1, 2]),
)
def test_the_best_evaluated_weights_come_back(
    scores: list[float], every: int, save: int, greater: bool, limit: int | None
) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        trainer = scripted(
            Path(folder),
            scores,
            eval_steps=every,
            save_steps=save,
            greater_is_better=greater,
            save_total_limit=limit,
        )
        trainer.train()
        seen = scores[: len(trainer.hashes)]
        real = [value for value in seen if value == value]
        if not real:
            assert trainer.state.best_model_checkpoint is None
            return
        best = seen.index(max(real) if greater else min(real))
        assert weights_hash(trainer.model) == trainer.hashes[best]
        assert trainer.state.best_metric == seen[best]
        step = trainer.state.best_global_step
        assert trainer.state.best_model_checkpoint == str(Path(folder) / f"checkpoint-{step}")
        kept = sorted(int(p.name.split("-")[1]) for p in Path(folder).glob("checkpoint-*"))
        assert step in kept
        assert limit is None or len(kept) <= limit + 1


@pytest.mark.parametrize(
    "strategies", [("epoch", "epoch"), ("steps", "best"), ("epoch", "best"), ("steps", "epoch")]
)
def test_other_strategies(tmp_path: Path, strategies: tuple[str, str]) -> None:
    evaluating, saving = strategies
    trainer = scripted(
        tmp_path, [0.1, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1], eval_strategy=evaluating, save_strategy=saving,
        max_steps=-1, num_train_epochs=3, per_device_train_batch_size=12,
    )  # fmt: skip
    trainer.train()
    assert weights_hash(trainer.model) == trainer.hashes[1]


@pytest.mark.parametrize(("changes", "expected"), [
    ({"per_device_train_batch_size": 12}, [(2, 1, 0.5), (4, 2, 0.6)]),
    ({"max_steps": 3, "eval_steps": 3}, [(3, 1, 0.5)]),
    ({"leaves": True}, [(2, 1, 0.5)]),
], ids=["data of the epoch spent", "run ends within it", "a callback leaves it"])  # fmt: skip
def test_a_best_evaluation_at_the_end_of_an_epoch_is_saved_once_with_it(
    tmp_path: Path, changes: dict[str, Any], expected: list[tuple[int, int, float]]
) -> None:
    saved: list[tuple[int, int, float]] = []
    given = {"save_strategy": "epoch", "max_steps": 4, "eval_steps": 2, **changes}
    leaves = given.pop("leaves", False)

    class Notes(TrainerCallback):
        ended = 0

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = leaves

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ended += 1

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append((state.global_step, self.ended, state.best_metric))

    trainer = scripted(tmp_path, [0.5, 0.6], **given)
    trainer.add_callback(Notes())
    trainer.train()
    assert saved == expected
    assert weights_hash(trainer.model) == trainer.hashes[-1]


def test_with_a_limit_of_one_best_and_last_may_remain(tmp_path: Path) -> None:
    trainer = scripted(tmp_path, [0.1, 0.9, 0.2, 0.3, 0.4, 0.5], save_total_limit=1)
    trainer.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]


def test_saving_only_the_best(tmp_path: Path) -> None:
    trainer = scripted(
        tmp_path, [0.1, 0.9, 0.2, 0.95, 0.4, 0.5], save_strategy="best", load_best_model_at_end=False
    )
    trainer.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 4)]
    assert trainer.state.best_metric == 0.95


def test_the_best_is_remembered_by_a_resumed_run(tmp_path: Path) -> None:
    first = scripted(tmp_path, [0.1, 0.9, 0.2], max_steps=3, lr_scheduler_type="constant")
    first.train()
    second = scripted(tmp_path, [0.3, 0.4, 0.5], lr_scheduler_type="constant")
    second.train(resume_from_checkpoint=True)
    assert second.state.best_global_step == 2
    assert weights_hash(second.model) == first.hashes[1]


def test_a_resumed_run_that_ranks_otherwise_takes_no_best_over(tmp_path: Path, caplog: Any) -> None:
    """Before, a value of the other rule that no evaluation exceeded stayed the best."""
    same = {"lr_scheduler_type": "constant"}
    scripted(tmp_path, [0.5, 0.1, 0.2], max_steps=3, greater_is_better=False, **same).train()
    second = scripted(tmp_path, [0.05, 0.04, 0.03], greater_is_better=True, **same)
    second.train(resume_from_checkpoint=True)
    assert "the best so far is not taken over" in caplog.text
    assert (second.state.best_global_step, second.state.best_metric) == (4, 0.05)
    assert weights_hash(second.model) == second.hashes[0]


@pytest.mark.parametrize("name", ["score", "eval_score"])
def test_the_prefix_is_optional(tmp_path: Path, name: str) -> None:
    trainer = scripted(tmp_path, [0.1, 0.3, 0.2, 0.1, 0.1, 0.1], metric_for_best_model=name)
    assert trainer.args.greater_is_better
    trainer.train()
    assert trainer.state.best_metric == 0.3


@pytest.mark.parametrize(
    "goal",
    [
        {"load_best_model_at_end": True},
        {"save_strategy": "best"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {},  # the best step is noted all the same, and early stopping may go by it
    ],
)
def test_a_metric_that_evaluation_never_returns_is_found_before_training(
    tmp_path: Path, goal: dict[str, Any]
) -> None:
    given = {"eval_strategy": "steps", "save_strategy": "steps", "metric_for_best_model": "f1"}
    args = arguments(tmp_path, **(given | goal))
    trainer = Trainer(Net(), args, train_dataset=rows(8), eval_dataset=rows(4))
    with pytest.raises(ConfigError, match=r"f1.*eval_loss"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_metric_of_a_named_set(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_far_loss",
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset={"near": rows(4), "far": rows(5)})
    trainer.train()
    losses = [entry["eval_far_loss"] for entry in trainer.state.log_history if "eval_far_loss" in entry]
    assert trainer.state.best_metric == min(losses)


@given(
    scores=scores,
    every=st.integers(1, 3),
    save=st.integers(1, 7),
    greater=st.booleans(),
    best=st.integers(1, 3),
    last=st.none() | st.integers(1, 2),
)
def test_the_best_evaluations_are_kept_whatever_the_strides(
    scores: list[float], every: int, save: int, greater: bool, best: int, last: int | None
) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        trainer = scripted(
            Path(folder),
            scores,
            eval_steps=every,
            save_steps=save,
            greater_is_better=greater,
            keep_best=best,
            keep_last=last,
        )
        trainer.train()
        evaluated = [*range(every, 7, every), *([6] if 6 % every else [])]
        given_scores = dict(zip(evaluated, scores, strict=False))
        rated = sorted(
            (step for step, score in given_scores.items() if math.isfinite(score)),
            key=lambda step: (-1 if greater else 1) * given_scores[step],
        )
        there = {int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*")}
        assert set(rated[:best]) <= there
        assert 6 in there
        saved = [step for step in range(1, 7) if step % save == 0 or step == 6 or step in there]
        assert there == set(rated[:best]) | set(saved[-(last or 1) :])


def test_the_best_evaluations_survive_a_resume(tmp_path: Path) -> None:
    scripted(tmp_path, [0.9, 0.1, 0.2], max_steps=3, keep_best=1, greater_is_better=True).train()
    again = scripted(tmp_path, [0.3, 0.4, 0.5], keep_best=1, greater_is_better=True)
    again.train(resume_from_checkpoint=True)
    assert again._run.checkpoints.best.evaluations == [[0.9, 1]]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-6"}
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def metrics_of(folder: Path) -> dict[int, float | None]:
    return {info.step: info.meta["metric"] for info in Store(folder).list()}


def test_a_checkpoint_says_the_metric_of_its_own_run_and_step(tmp_path: Path) -> None:
    """A run that is stopped as soon as it was resumed saves its step again; a new run knows nothing of an earlier."""

    class Stopping(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                signal.raise_signal(signal.SIGINT)

    scripted(tmp_path, [0.5, 0.6], max_steps=2).train()
    again = scripted(tmp_path, [])
    again.add_callback(Stopping())
    again.train(resume_from_checkpoint=True)
    assert metrics_of(tmp_path) == {1: 0.5, 2: 0.6}

    twice = scripted(tmp_path / "twice", [0.5, 0.6], max_steps=2)
    twice.train()
    twice.args.eval_strategy, twice.args.load_best_model_at_end = "no", False
    twice.args.metric_for_best_model = None
    twice._run.checkpoints.ephemeral = True  # as the last save of a run may have been
    twice.train()
    assert metrics_of(tmp_path / "twice") == {1: None, 2: None}
    assert twice._run.checkpoints.ephemeral is False


def failing_at_step(step: int) -> Callable[[Files, int, memoryview], int]:
    """What writes, but fails in the thread that saves `step`."""
    write = Files.write_some

    def fail(files: Files, descriptor: int, piece: memoryview) -> int:
        if threading.current_thread().name == f"windlass-save-{step}":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(files, descriptor, piece)

    return fail


def test_the_best_evaluation_is_one_whose_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails when the best of all is saved: the best of the others comes back, not the first of them."""
    monkeypatch.setattr(Files, "write_some", failing_at_step(2))
    trainer = scripted(tmp_path, [0.1, 0.9, 0.3, 0.5, 0.2, 0.4], greater_is_better=True)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.5, 4)
    assert weights_hash(trainer.model) == trainer.hashes[3]


def test_a_save_that_fails_drives_none_of_the_best_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at the best of all: the two best are those of the others, the first among them."""
    monkeypatch.setattr(Files, "write_some", failing_at_step(3))
    scores = [0.4, 0.5, 0.9, 0.3, 0.2, 0.1]
    trainer = scripted(tmp_path, scores, greater_is_better=True, keep_best=2, load_best_model_at_end=False)
    trainer.train()
    assert trainer._run.checkpoints.best.evaluations == [[0.5, 2], [0.4, 1]]
    assert sorted(metrics_of(tmp_path)) == [1, 2, 6]


def test_what_is_the_best_waits_for_the_save_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that is worse than the one whose save fails, and better than all others, is saved."""
    monkeypatch.setattr(Files, "write_some", failing_at_step(2))
    scores = [0.1, 0.9, 0.5, 0.3, 0.2, 0.4]
    trainer = scripted(tmp_path, scores, greater_is_better=True, save_steps=6)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert weights_hash(trainer.model) == trainer.hashes[2]


def saved_before_evaluated(folder: Path) -> Scripted:
    """Each update is saved, and the first epoch, evaluated after the save of its last update, is the best."""
    given = {"eval_strategy": "epoch", "save_total_limit": 2, "load_best_model_at_end": False}
    given |= {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 12}
    return scripted(folder, [0.5, 0.1, 0.3], **given)


def test_the_checkpoint_of_an_evaluated_step_is_the_best_if_it_was_saved_before(tmp_path: Path) -> None:
    trainer = saved_before_evaluated(tmp_path)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert sorted(metrics_of(tmp_path)) == [2, 6]


def test_so_it_is_where_the_run_is_resumed_between_both(tmp_path: Path) -> None:
    def work() -> None:
        trainer = saved_before_evaluated(tmp_path)
        trainer.add_callback(kill("on_save", 2))
        trainer.train()

    assert in_a_child(work) == KILLED
    trainer = saved_before_evaluated(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_so_it_is_not_where_that_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "write_some", failing_at_step(2))
    trainer = saved_before_evaluated(tmp_path)
    trainer.train()
    assert trainer.state.best_model_checkpoint is None
    assert sorted(metrics_of(tmp_path)) == [5, 6]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"keep_last": 2, "save_total_limit": 3}, ["keep_last"]),
        ({"keep_last": 0}, ["keep_last"]),
        (
            {"keep_best": 2, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False},
            ["keep_best", "keep_best"],
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, Any], fields: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        scripted(tmp_path, [], **changes)
    assert [problem.field for problem in caught.value.problems] == fields
