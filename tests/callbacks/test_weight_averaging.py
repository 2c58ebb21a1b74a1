"""Averages of weights: the formula, which weights are used when, and resuming."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, rows, weights_hash
from tests.trainer.unfrozen_runs import TwoLayers, Unfreezes, samples
from torch import Tensor, nn

from windlass import EMACallback, SWACallback, Trainer, TrainerCallback
from windlass.core.errors import CheckpointError, ConfigError
from windlass.dist.sharded import is_sharded, whole


class Seen(TrainerCallback):
    """The weights of training after each update, and the losses of evaluations."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append([p.detach().clone() for p in model.parameters()])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def train(
    folder: Path,
    average: Any,
    steps: int = 6,
    resume: bool = False,
    dtype: torch.dtype | None = None,
    model: Any = Net,
    **changes: Any,
) -> tuple[Trainer, Seen]:
    seen = Seen()
    options = {"max_steps": steps, "lr_scheduler_type": "constant", "learning_rate": 0.3, **changes}
    args = arguments(folder, **options)
    data = [{**row, "x": row["x"].to(dtype)} for row in rows(24)]
    trainer = Trainer(
        model().to(dtype), args, train_dataset=data, eval_dataset=data[:8], callbacks=[seen, average]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


def assert_weights(model: Any, expected: list[Tensor]) -> None:
    for mine, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), wanted, rtol=0, atol=1e-6)


def test_the_exponential_average_is_the_formula(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, EMACallback(decay=0.9))
    expected = seen.weights[0]
    for weights in seen.weights[1:]:
        expected = [0.9 * a + 0.1 * w for a, w in zip(expected, weights, strict=True)]
    assert_weights(trainer.model, expected)


def test_the_uniform_average_is_the_mean_of_what_counts(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, SWACallback(start_step=2, every=2))
    counted = [seen.weights[step - 1] for step in (2, 4, 6)]
    assert_weights(trainer.model, [torch.stack(group).mean(0) for group in zip(*counted, strict=True)])


@pytest.mark.parametrize("start", [1, 2, 4])
def test_weights_that_are_unfrozen_meanwhile_are_averaged_too(tmp_path: Path, start: int) -> None:
    """Weights of updates in which they were frozen count as well."""
    seen, options = Seen(), {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer = Trainer(
        TwoLayers(), arguments(tmp_path, max_steps=6, **options), train_dataset=samples(),
        callbacks=[seen, SWACallback(start_step=start), Unfreezes()],
    )  # fmt: skip
    trainer.train()
    counted = seen.weights[start - 1 :]
    assert not torch.equal(counted[0][0], counted[-1][0])
    assert_weights(trainer.model, [torch.stack(group).mean(0) for group in zip(*counted, strict=True)])


class UnfreezesAtStep(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step >= 2:
            model.first.requires_grad_(True)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_unfreezes_weights_resumes_to_the_bit(tmp_path: Path, stop: int) -> None:
    """Before and after it did; the script begins with them frozen."""

    def train(folder: str, steps: int, resume: bool = False) -> str:
        model, options = TwoLayers(), {"save_strategy": "steps", "save_steps": stop}
        args = arguments(tmp_path / folder, max_steps=steps, lr_scheduler_type="constant", **options)
        trainer = Trainer(
            model, args, train_dataset=samples(), callbacks=[EMACallback(0.5), UnfreezesAtStep()],
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return weights_hash(model)

    clean = train("a", 6)
    train("b", stop)
    assert train("b", 6, resume=True) == clean


def test_a_rollback_to_before_weights_were_unfrozen_keeps_their_average() -> None:
    callback, model = EMACallback(0.5), TwoLayers()
    step: Any = type("State", (), {"global_step": 1})
    callback.begin(model)
    callback.take()
    before = callback.state_dict()
    model.first.requires_grad_(True)
    callback.on_step_begin(None, step, None)  # type: ignore[arg-type]
    assert callback.state_dict()["average"].keys() > before["average"].keys()
    callback.load_state_dict(before)
    callback.on_step_begin(None, step, None)  # type: ignore[arg-type]
    assert torch.equal(callback.state_dict()["average"]["first.weight"], model.first.weight)


def test_evaluations_use_the_average_and_training_goes_on_from_its_own_weights(tmp_path: Path) -> None:
    plain, alone = train(tmp_path / "a", SWACallback(start_step=100))
    trainer, seen = train(tmp_path / "b", EMACallback(0.9), eval_strategy="steps", eval_steps=2)
    for one, other in zip(seen.weights, alone.weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert trainer.evaluate()["eval_loss"] == seen.losses[-1], "what is left after training is the average"
    assert plain.evaluate()["eval_loss"] != seen.losses[-1]


@pytest.mark.parametrize("average", [lambda: EMACallback(0.9), lambda: SWACallback(2)], ids=["EMA", "SWA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, average: Any, dtype: torch.dtype) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3, "dtype": dtype}
    clean, _ = train(tmp_path / "a", average(), 6, **saves)
    train(tmp_path / "b", average(), 3, **saves)
    again, _ = train(tmp_path / "b", average(), 6, resume=True, **saves)
    assert weights_hash(clean.model.float()) == weights_hash(again.model.float())


class Failing(TrainerCallback):
    """Fails once, after the fifth update."""

    def __init__(self) -> None:
        self.has_failed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("the fifth update")


@pytest.mark.parametrize("average", [lambda: EMACallback(0.9), lambda: SWACallback(2)], ids=["EMA", "SWA"])
def test_a_failed_run_is_resumed_by_the_same_trainer(tmp_path: Path, average: Any) -> None:
    options = {"max_steps": 6, "lr_scheduler_type": "constant", "learning_rate": 0.3}
    clean, _ = train(tmp_path / "a", average())
    args = arguments(tmp_path / "b", save_strategy="steps", save_steps=3, **options)
    trainer = Trainer(Net(), args, train_dataset=rows(24), callbacks=[average(), Failing()])
    with pytest.raises(RuntimeError, match="the fifth update"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert weights_hash(trainer.model) == weights_hash(clean.model)


class Mixed(nn.Module):
    """Three layers of one shape; the second is in half precision, so a checkpoint lists its average first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(4, 4, generator=generator) * 0.5)
        self.second.bfloat16()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.third(self.second(self.first(x).bfloat16()).float())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("average", [lambda: EMACallback(0.5), lambda: SWACallback(2)], ids=["EMA", "SWA"])
def test_a_stopped_run_of_mixed_dtypes_ends_with_the_same_bits(tmp_path: Path, average: Any) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3, "model": Mixed}
    clean, _ = train(tmp_path / "a", average(), 6, **saves)
    train(tmp_path / "b", average(), 3, **saves)
    again, _ = train(tmp_path / "b", average(), 6, resume=True, **saves)
    assert weights_hash(clean.model.float()) == weights_hash(again.model.float())


def test_an_evaluation_makes_no_copy_of_the_average(tmp_path: Path) -> None:
    """For the case that it is abandoned. On several ranks it would be gathered first."""
    asked: list[int] = []

    class Counting(EMACallback):
        def state_dict(self) -> Any:
            asked.append(self._count)
            return super().state_dict()

    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    train(tmp_path, Counting(decay=0.9), **changes)
    assert asked == [3, 6], "two saves"


def test_two_averages_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    trainer = Trainer(Net(), args, train_dataset=rows(24), callbacks=[EMACallback(), SWACallback()])
    with pytest.raises(ConfigError, match=r"EMACallback, SWACallback': .* one average of its weights"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"EMACallback.*ScheduleFreeSGD averages the weights itself"):
        train(tmp_path, EMACallback(), optim="schedule_free_sgd")


def test_what_is_saved_is_what_was_evaluated(tmp_path: Path) -> None:
    """Also by a callback in the middle of training, and at the end."""

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                trainer.save_model(str(tmp_path / "own"))
                assert_weights(trainer.model, seen.weights[-1])

    seen = Seen()
    args = arguments(
        tmp_path,
        max_steps=4,
        lr_scheduler_type="constant",
        learning_rate=0.3,
        save_strategy="steps",
        save_steps=3,
    )
    trainer = Trainer(Net(), args, train_dataset=rows(24), callbacks=[seen, EMACallback(0.9), Save()])
    trainer.train()
    expected = seen.weights[0]
    for weights in seen.weights[1:3]:
        expected = [0.9 * a + 0.1 * w for a, w in zip(expected, weights, strict=True)]
    for folder in ("checkpoint-3", "own"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        torch.testing.assert_close(saved["layer.weight"], expected[0], rtol=0, atol=1e-6)


def test_the_best_model_is_an_average(tmp_path: Path) -> None:
    trainer, seen = train(
        tmp_path, EMACallback(0.5), eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True,
    )  # fmt: skip
    best = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    assert torch.equal(trainer.model.layer.weight, best["layer.weight"])
    assert trainer.evaluate()["eval_loss"] == min(seen.losses)


def test_half_precision_has_an_average_in_single(tmp_path: Path) -> None:
    callback = EMACallback(0.5)
    model = Net().bfloat16()

    callback.on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]
    state: Any = type("State", (), {"global_step": 1})
    callback.on_step_end(None, state, None)  # type: ignore[arg-type]
    assert {t.dtype for t in callback.state_dict()["average"].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMACallback(decay=1.0), "decay=1.0"),
        (lambda: EMACallback(decay="0.9"), "decay='0.9'"),  # type: ignore[arg-type]
        (lambda: EMACallback(every=0), "every=0"),
        (lambda: EMACallback(every=None), "every=None"),  # type: ignore[arg-type]
        (lambda: SWACallback(start_step=-1), "start_step=-1"),
        (lambda: SWACallback(every=1.5), "every=1.5"),  # type: ignore[arg-type]
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.dist
def test_sharded_weights_have_the_same_average(tmp_path: Path) -> None:
    first, second = on_ranks(2, main, tmp_path)
    # It waited in the exchange of the average, which the other rank never joined.
    assert (
        first.pop("unsaved")
        == "checkpoint 1 was dropped: rank 1 has nothing to save: a callback's own mistake"
    )
    assert second.pop("unsaved") == "a callback's own mistake"
    assert first == second
    assert first["clean"] == first["again"] == first["failed"]
    seen = Seen()
    data = [{**row, "x": row["x"].double()} for row in rows(24)]
    args = arguments(
        tmp_path / "alone", max_steps=6, lr_scheduler_type="constant", learning_rate=0.3, eval_strategy="steps",
        eval_steps=3,
    )  # fmt: skip
    alone = Trainer(
        Net().double(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[seen, EMACallback(0.9)]
    )
    alone.train()
    for mine, theirs in zip(alone.model.parameters(), first["clean"]["weights"], strict=True):
        assert mine.detach().flatten().tolist() == pytest.approx(theirs, abs=1e-12)
    assert first["clean"]["loss"] == pytest.approx(seen.losses[-1], abs=1e-9)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def train_sharded(folder: Path, steps: int, resume: bool = False, fails: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    options |= {"fsdp": "full_shard", "lr_scheduler_type": "constant", "learning_rate": 0.3}
    args = arguments(folder, max_steps=steps, per_device_train_batch_size=2, **options)
    data = rows(24)
    callbacks = [EMACallback(0.9), *([Failing()] if fails else [])]
    trainer = Trainer(
        Net().double(), args, train_dataset=doubled(data), eval_dataset=doubled(data)[:8], callbacks=callbacks
    )
    with pytest.raises(RuntimeError, match="the fifth update") if fails else nullcontext():
        trainer.train(resume_from_checkpoint=resume)
    if fails:
        trainer.train(resume_from_checkpoint=True)
    assert all(map(is_sharded, trainer.model.parameters()))
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"weights": [whole(p).flatten().tolist() for p in trainer.model.parameters()], "loss": losses[-1]}


class HasNoState(TrainerCallback):
    def state_dict(self) -> dict[str, Any]:
        if os.environ["RANK"] == "1":
            raise ValueError("a callback's own mistake")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def unsaved(folder: Path) -> str:
    args = arguments(folder, max_steps=1, fsdp="full_shard", ddp_timeout=20)
    args.set_save(strategy="steps", steps=1)
    trainer = Trainer(Net(), args, train_dataset=rows(8), callbacks=[HasNoState(), EMACallback(0.9)])
    with pytest.raises((CheckpointError, ValueError)) as caught:
        trainer.train()
    return str(caught.value)


def doubled(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "x": row["x"].double()} for row in data]


def main(folder: Path) -> dict[str, Any]:
    clean = train_sharded(folder / "a", 6)
    train_sharded(folder / "b", 3)
    again = train_sharded(folder / "b", 6, resume=True)
    failed = train_sharded(folder / "c", 6, fails=True)
    return {"clean": clean, "again": again, "failed": failed, "unsaved": unsaved(folder / "d")}
