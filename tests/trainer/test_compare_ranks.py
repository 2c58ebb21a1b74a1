"""Ranks that were given different settings, models or data are named before the first update."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.test_losses import Model, samples, trainer_for
from torch import nn
from torch.utils.data import DataLoader

from windlass import Accelerator, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from windlass.config.arguments import shared_arguments
from windlass.config.sections.setting import rules_of
from windlass.core.errors import RankMismatchError
from windlass.dist.differences import differences

EXPECTED = {
    "learning_rate": "0.001 on rank 0, 0.002 on rank 1",
    "max_grad_norm": "1.0 on rank 0, 0.5 on rank 1",
    "optim": "'adamw_torch' on rank 0, 'sgd' on rank 1",
    "save_steps": "10 on rank 0, 20 on rank 1",
    "seed": "1 on rank 0, 2 on rank 1",
    "train_dataset": "'8 samples' on rank 0, '6 samples' on rank 1",
    "resume_from_checkpoint": "None on rank 0, True on rank 1",
    "call": "Trainer.evaluate at test_compare_ranks.py on rank 0, Trainer.train at test_compare_ranks.py on rank 1",
    "compute_metrics": "'none' on rank 0, 'given' on rank 1",
    "model.layer.bias": "'float32[2]' on rank 0, 'float32[2] frozen' on rank 1",
    "optimizer.group 0.lr": "0.1 on rank 0, 0.2 on rank 1",
    "callbacks": "['DefaultFlowCallback'] on rank 0, ['DefaultFlowCallback', 'EarlyStoppingCallback'] on rank 1",
    "plan.precision.compute": "'fp32' on rank 0, 'bf16' on rank 1",
    "gradient_accumulation_steps": "1 on rank 0, 2 on rank 1",
    "mixed_precision": "'no' on rank 0, 'bf16' on rank 1",
    "split_batches": "False on rank 0, True on rank 1",
    "prepare() argument 0, model.weight": "'float32[2, 3]' on rank 0, 'float32[4, 3]' on rank 1",
    "prepare() argument 1, optimizer.group 0.lr": "0.1 on rank 0, 0.2 on rank 1",
    "prepare() argument 2, loader.samples": "8 on rank 0, 6 on rank 1",
}


@pytest.mark.dist
def test_what_differs_between_ranks_is_named_on_all_of_them(folder: Path) -> None:
    found = on_ranks(2, main, folder)
    assert found[0] == found[1]
    for name, values in EXPECTED.items():
        assert f"{name}: {values}" in found[0][name], (name, found[0][name])
    assert found[0]["steps"] == 3, "what may differ between ranks must not be refused"


def test_ranks_with_the_same_value_are_named_together() -> None:
    assert differences([{"a": "1", "b": "2"}, {"a": "3", "b": "2"}, {"a": "1", "b": "2"}, {"b": "2"}]) == [
        "a: 1 on ranks 0, 2, 3 on rank 1, (missing) on rank 3"
    ]


def test_secrets_are_not_shown() -> None:
    (line,) = differences([{"x.hub_token": "abc"}, {"x.hub_token": "def"}])
    assert line == "x.hub_token: (a secret value) on rank 0, (a secret value) on rank 1"


def test_arguments_that_may_differ_have_a_reason_and_are_not_compared() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    may_differ = {name for name, rules in rules_of(TrainingArguments).items() if rules.per_rank}
    assert {"output_dir", "hub_token", "dataloader_num_workers"} <= may_differ
    assert shared_arguments(TrainingArguments("out")).keys() == names - may_differ


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path()  # where the runs are, set by `main`


def of_rank(first: Any, second: Any) -> Any:
    return (first, second)[RANK]


def trainer(name: str, **changes: Any) -> Trainer:
    return trainer_for(FOLDER / name, **{"ddp_timeout": 60, **changes})


def wrong_arguments(name: str, first: Any, second: Any) -> Callable[[], Any]:
    return lambda: trainer(name, **{name: of_rank(first, second)}).train()


def evaluation_on_one_rank() -> None:
    run = trainer("call", eval_dataset=samples(4))
    run.train() if RANK else run.evaluate()


def metrics_on_one_rank() -> None:
    measured = of_rank(None, lambda prediction: {"accuracy": 1.0})
    trainer("metrics", eval_dataset=samples(4), compute_metrics=measured).evaluate()


def frozen_on_one_rank() -> None:
    model = Model()
    model.layer.bias.requires_grad_(RANK == 0)
    trainer("frozen", model=model).train()


def own_optimizer() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=of_rank(0.1, 0.2), momentum=0.9)
    run = trainer("optimizer", model=model)
    run.optimizer = optimizer
    run.train()


def stops_early_on_one_rank() -> None:
    run = trainer("early", eval_dataset=samples(4), eval_strategy="steps", eval_steps=1)
    if RANK:
        run.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    run.train()


def precision_of_the_environment() -> None:
    """No argument differs: only the plan shows it."""
    if RANK:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    try:
        trainer("precision").train()
    finally:
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def accelerator(**settings: Any) -> Accelerator:
    from windlass.compat.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def loop_of_its_own(rate: float = 0.1, count: int = 8, width: int = 2, **settings: Any) -> None:
    model = nn.Linear(3, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader: DataLoader[Any] = DataLoader(samples(count), batch_size=2)  # type: ignore[arg-type]
    accelerator(**settings).prepare(model, optimizer, loader)


CASES: dict[str, Callable[[], Any]] = {
    "learning_rate": wrong_arguments("learning_rate", 0.001, 0.002),
    "max_grad_norm": wrong_arguments("max_grad_norm", 1.0, 0.5),
    "optim": wrong_arguments("optim", "adamw_torch", "sgd"),
    "save_steps": wrong_arguments("save_steps", 10, 20),
    "seed": wrong_arguments("seed", 1, 2),
    "train_dataset": wrong_arguments("data", samples(8), samples(6)),
    "resume_from_checkpoint": lambda: trainer("resumed").train(resume_from_checkpoint=of_rank(None, True)),
    "call": evaluation_on_one_rank,
    "compute_metrics": metrics_on_one_rank,
    "model.layer.bias": frozen_on_one_rank,
    "optimizer.group 0.lr": own_optimizer,
    "callbacks": stops_early_on_one_rank,
    "plan.precision.compute": precision_of_the_environment,
    "gradient_accumulation_steps": lambda: loop_of_its_own(gradient_accumulation_steps=of_rank(1, 2)),
    "mixed_precision": lambda: loop_of_its_own(mixed_precision=of_rank("no", "bf16")),
    "split_batches": lambda: loop_of_its_own(split_batches=of_rank(False, True)),
    "prepare() argument 0, model.weight": lambda: loop_of_its_own(width=of_rank(2, 4)),
    "prepare() argument 1, optimizer.group 0.lr": lambda: loop_of_its_own(rate=of_rank(0.1, 0.2)),
    "prepare() argument 2, loader.samples": lambda: loop_of_its_own(count=of_rank(8, 6)),
}


class OfItsOwnGenerator:
    """Rows with noise that differs each time they are read, so they cannot be compared."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(RANK)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return {**row, "x": row["x"] + torch.rand(3, generator=self.generator)}


class OfOneRank(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def what_may_differ() -> int:
    """A run in which everything differs that may."""
    run = trainer(
        f"output-{RANK}",
        log_level=of_rank("error", "critical"),
        disable_tqdm=bool(RANK),
        dataloader_num_workers=RANK,
        report_to=of_rank("none", []),
        run_name=f"rank {RANK}",
        eval_dataset=OfItsOwnGenerator(samples(4)),
    )
    if RANK:
        run.add_callback(OfOneRank)
    run.train()
    run.evaluate()
    loop_of_its_own()
    return run.state.global_step


def main(folder: Path) -> dict[str, Any]:
    global FOLDER
    FOLDER, said = folder, dict[str, Any]()
    for name, case in CASES.items():
        try:
            case()
        except RankMismatchError as error:
            said[name] = [re.sub(r"\.py:\d+", ".py", line) for line in error.differences]
        else:
            said[name] = ["nothing"]
    said["steps"] = what_may_differ()
    trainer("end").end()
    return said
