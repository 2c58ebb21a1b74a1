"""The plan of a call: what makes it, how often, and which one a method that a script calls alone gets."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.config.plan import CallPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.trainer.plans import Plans


def made(folder: Path, **changes: Any) -> Trainer:
    args = arguments(folder, **changes)
    return Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(4))


def calls_of(work: Callable[[], Any]) -> Counter[str]:
    """How often `work` calls each function of `assemble/`, as "resolve.resolve_call"."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, value: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("windlass.assemble."):
            found[f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"] += 1

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(earlier)
    return found


def test_a_run_is_resolved_once(tmp_path: Path) -> None:
    trainer = made(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    found = calls_of(trainer.train)
    once = [
        "resolve.resolve_call", "resolve.resolve_run", "resolve.resolve_parallel", "resolve.resolve_optimizer",
        "resolve.resolve_duration", "batch.resolve_batches", "batch.update_size", "rules.broken_rules",
    ]  # fmt: skip
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_an_evaluation_is_resolved_once(call: str, tmp_path: Path) -> None:
    trainer = made(tmp_path)
    found = calls_of(trainer.evaluate if call == "evaluate" else lambda: trainer.predict(rows(4)))
    assert (found["resolve.resolve_call"], found["resolve.resolve_run"]) == (1, 0)


def test_methods_that_are_called_alone_use_the_arguments_of_that_moment(tmp_path: Path) -> None:
    trainer = made(tmp_path, learning_rate=0.1)
    trainer.args.learning_rate = 0.25
    assert trainer.create_optimizer().param_groups[0]["lr"] == 0.25
    trainer.args.warmup_steps = 0.5
    trainer.create_scheduler(8)
    assert [trainer.lr_scheduler.lrs(step)[0] for step in (2, 4)] == [0.125, 0.25]
    trainer.args.per_device_train_batch_size, trainer.args.dataloader_num_workers = 2, 1
    loader = trainer.get_train_dataloader()
    assert (loader.batch_size, loader.num_workers) == (2, 1)
    trainer.args.gradient_accumulation_steps = 3
    assert trainer.get_total_train_batch_size() == 6


def test_what_an_overridden_method_assigns_has_an_effect(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.args.learning_rate = 0.25
            return super().create_optimizer(model)

    trainer = Mine(Net(), arguments(tmp_path, learning_rate=0.1), train_dataset=rows(16))
    trainer.train()
    assert trainer.optimizer.defaults["lr"] == 0.25


def test_an_overridden_choice_of_the_optimizer_is_used(tmp_path: Path) -> None:
    class Mine(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
            cls, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return cls, {**keywords, "lr": 2 * args.learning_rate}

    trainer = Mine(Net(), arguments(tmp_path, learning_rate=0.25), train_dataset=rows(16))
    trainer.train()
    assert trainer.optimizer.defaults["lr"] == 0.5


def test_a_plan_is_kept_until_an_argument_is_assigned(tmp_path: Path) -> None:
    args, plans = arguments(tmp_path), Plans(World())
    plans.args = args
    first = plans.begin()
    assert isinstance(first, CallPlan)
    assert plans.of(args) is first
    args.seed = 7
    second = plans.of(args)
    assert (second.seed, plans.of(args)) == (7, second)
    assert plans.of(arguments(tmp_path, seed=8)).seed == 8
    assert plans.begin() is not second


def test_the_plan_of_a_call_sees_what_changed_inside_a_value(tmp_path: Path) -> None:
    trainer = made(tmp_path, optim_groups={"layer": {"lr": 0.5}})
    trainer.args.optim_groups["layer"]["lr"] = 0.125
    trainer.train()
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert 0.125 in rates
    assert 0.5 not in rates


def test_a_wrong_argument_is_refused_wherever_the_plan_is_made(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.args.learning_rate = -1.0
    for call in (trainer.train, trainer.evaluate, trainer.create_optimizer):
        with pytest.raises(ConfigError, match="learning_rate"):
            call()


def test_a_precision_that_is_assigned_later_is_refused(
    tmp_path: Path,
) -> None:
    """The Accelerator of the Trainer would compute in the first one, and the logs would name the other."""
    trainer = made(tmp_path)
    trainer.args.bf16 = True
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=r"mixed precision 'bf16'.*made with mixed precision 'no'"):
            call()


def test_what_a_callback_assigns_in_vain_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers reads some of them in each step or save; here a run has one plan."""

    class Assigning(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.max_grad_norm, args.save_total_limit = 0.25, 2

    trainer = made(tmp_path, logging_steps=1, max_steps=3)
    trainer.add_callback(Assigning())
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "was changed from" in record.getMessage()]
    assert [line.partition(" was")[0] for line in said] == ["args.max_grad_norm", "args.save_total_limit"]
