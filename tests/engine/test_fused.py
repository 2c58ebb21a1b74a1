"""Updates inside the backward: the same weights as updates after it, and gradients that do not stay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fused_cases import GALORE, Tied, assert_same, rows, run
from tests.optim.helpers import heard
from tests.trainer.small import weights_hash
from torch import nn

from windlass import Trainer, TrainingArguments
from windlass.core.errors import ConfigError, MemoryShortError, ModelError, NonFiniteError
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks
from windlass.engine.fused import FusedExecutor
from windlass.engine.native import NativeExecutor
from windlass.optim.optimizers.adalomo import AdaLomo
from windlass.optim.optimizers.lomo import Lomo
from windlass.precision.scaler import LossScaler
from windlass.transforms.alone import Alone

CASES: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.5, "gradient_accumulation_steps": 3},
    {"nonfinite_policy": "skip"},
    {"lr_scheduler_type": "cosine"},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_lomo_is_sgd(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, seen = run(tmp_path / "a", "lomo", **changes)
    theirs, other = run(tmp_path / "b", "sgd", **changes)
    assert_same(ours, theirs)
    assert seen.norms == pytest.approx(other.norms, rel=1e-6)
    assert seen.losses == pytest.approx(other.losses, rel=1e-12)


@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adafactor", "galore_adamw_8bit", "apollo_adamw"])
def test_layer_wise_is_the_same_as_after_the_backward(
    tmp_path: Path, optim: str, changes: dict[str, Any]
) -> None:
    ours, seen = run(tmp_path / "a", f"{optim}_layerwise", **changes, **GALORE)
    theirs, other = run(tmp_path / "b", optim, **changes, **GALORE)
    assert_same(ours, theirs)
    assert seen.norms == pytest.approx(other.norms, rel=1e-6)


def test_adalomo_is_the_same_as_after_the_backward(tmp_path: Path) -> None:
    ours, _ = run(tmp_path / "a", "adalomo", weight_decay=0.1)
    model = Tied()
    plain = AdaLomo(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lr=0.05,
        in_backward=False,
    )
    args = TrainingArguments(
        str(tmp_path / "b"), per_device_train_batch_size=2, learning_rate=0.05, max_steps=5, max_grad_norm=0.0,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    theirs = Trainer(model, args, train_dataset=rows(22), optimizers=(plain, None))
    theirs.train()
    assert_same(ours, theirs)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_with_checkpointing(tmp_path: Path, clip: float) -> None:
    ours, _ = run(tmp_path / "a", "lomo", max_grad_norm=clip, activation_checkpointing=True)
    theirs, _ = run(tmp_path / "b", "sgd", max_grad_norm=clip)
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("optim", "changes"),
    [("adalomo", {}), ("lomo", {"max_grad_norm": 0.5}), ("galore_adamw_layerwise", GALORE)],
)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, optim: str, changes: dict[str, Any]) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant", **changes}
    clean, _ = run(tmp_path / "a", optim, max_steps=6, **options)
    run(tmp_path / "b", optim, max_steps=3, **options)
    again, _ = run(tmp_path / "b", optim, max_steps=6, resume=True, **options)
    assert weights_hash(clean.model) == weights_hash(again.model)


def test_an_optimizer_of_the_script_is_used_the_same_way(tmp_path: Path) -> None:
    model = Tied()
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, learning_rate=0.05, max_steps=5, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=rows(22), optimizers=(Lomo(model.parameters(), lr=0.05), None)
    )
    with heard() as records:
        trainer.train()
    assert "gradients are not clipped" in records[0].getMessage()
    assert_same(trainer, run(tmp_path / "b", "lomo")[0])


def peak_of_gradients(folder: Path, optim: str) -> int:
    """The most bytes of gradients that exist at a time in an update of twelve blocks."""
    model = Tied(blocks=12, width=8, vocabulary=7)
    assert model.embed.weight.numel() <= sum(p.numel() for p in model.blocks[0].parameters())
    most = 0

    def count(parameter: nn.Parameter) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    run(folder, optim, model=model, max_steps=2)
    return most


def test_gradients_of_few_parameters_exist_at_a_time(tmp_path: Path) -> None:
    ours, theirs = (peak_of_gradients(tmp_path / name, name) for name in ("adalomo", "adamw_torch"))
    assert theirs == sum(p.nbytes for p in Tied(blocks=12, width=8).parameters())
    assert ours <= theirs / 5


def failing_in_backward(model: Tied, at: int, error: Exception) -> None:
    calls = 0

    def fail(grad: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    def watch(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        if output.requires_grad and module.training:
            output.register_hook(fail)

    model.blocks[0].register_forward_hook(watch)


@pytest.mark.parametrize("optim", ["lomo", "sgd"])
def test_memory_that_runs_out_within_the_backward(tmp_path: Path, optim: str) -> None:
    """Weights may have changed: the next attempt starts with smaller micro-batches, from a checkpoint."""
    model = Tied()
    failing_in_backward(model, 3, torch.OutOfMemoryError("CUDA out of memory"))
    if optim == "lomo":
        with pytest.raises(MemoryShortError, match="micro-batches of 1"):
            run(tmp_path, optim, model=model, auto_find_batch_size=True)
        assert (tmp_path / "batch_sizes.json").exists()
    else:
        trainer, _ = run(tmp_path, optim, model=model, auto_find_batch_size=True)
        assert trainer.state.global_step == 5


def test_memory_that_runs_out_in_the_forward_is_tried_again(tmp_path: Path) -> None:
    class Hungry(Tied):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            if len(input_ids) > 1 and self.training and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, labels)

    ours, _ = run(tmp_path / "a", "lomo", model=Hungry(dropout=0.0), auto_find_batch_size=True)
    theirs, _ = run(tmp_path / "b", "sgd", model=Tied(dropout=0.0))
    assert_same(ours, theirs)


def broken(at: int) -> Tied:
    """A model whose gradient is NaN in one forward."""
    model, calls = Tied(), 0

    def spoil(module: nn.Module, arguments: Any, output: torch.Tensor) -> Any:
        nonlocal calls
        calls += module.training and torch.is_grad_enabled()
        return output * torch.nan if calls == at else output

    model.blocks[1].register_forward_hook(spoil)
    return model


def test_a_non_finite_update_is_refused_before_any_weight_changes(tmp_path: Path) -> None:
    with heard():
        ours, _ = run(tmp_path / "a", "lomo", model=broken(4), nonfinite_policy="skip")
        theirs, _ = run(tmp_path / "b", "sgd", model=broken(4), nonfinite_policy="skip")
    assert any("skipped_update" in row for row in ours.state.log_history)
    assert_same(ours, theirs)


def test_a_non_finite_update_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        run(tmp_path, "lomo", model=broken(3))


def test_two_backwards_of_one_update_are_refused(tmp_path: Path) -> None:
    class Twice(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    args = TrainingArguments(str(tmp_path), optim="lomo", max_steps=1, report_to="none", use_cpu=True)
    with pytest.raises(ModelError, match="pass one loss to backward"):
        Twice(Tied(), args, train_dataset=rows(8)).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "leave use_reentrant out"),
        ({"torch_compile": True, "max_grad_norm": 0.5}, "do not compile"),
    ],
)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "lomo", activation_checkpointing=True, **changes)


class Step(StepHooks):
    """The hooks of one update of a linear model."""

    def __init__(self, executor: FusedExecutor, scale: float = 1.0) -> None:
        self.executor, self.scale = executor, scale

    def micro_step(self, update: UpdateBatch, index: int) -> torch.Tensor:
        loss = self.executor.model(update.batches[index]).float().square().mean() * self.scale
        self.executor.backward(loss)
        return loss.detach()


def scaled_updates(lr: float, executor: Any, init_scale: float) -> tuple[list[bool], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    kind = Lomo if executor is FusedExecutor else torch.optim.SGD
    scaler = LossScaler(torch.device("cpu"), init_scale=init_scale, growth_interval=1)
    made = executor(Alone(model), kind(model.parameters(), lr=lr), torch.device("cpu"), scaler)
    applied = []
    for _ in range(4):
        update = UpdateBatch([torch.ones(4, 3)], [[0]], 4, 0, False, denominator=1.0)
        result = made.run_step(update, Step(made, scale=8.0), max_norm=0.5)
        applied.append(result.applied)
    return applied, model.weight.detach()


@pytest.mark.parametrize("init_scale", [1024.0, 2.0**127])
def test_a_loss_scale_takes_two_backwards(init_scale: float) -> None:
    """An overflow is found in the first one, before any weight changes."""
    ours, mine = scaled_updates(0.1, FusedExecutor, init_scale)
    theirs, other = scaled_updates(0.1, NativeExecutor, init_scale)
    assert ours == theirs
    assert all(ours) == (init_scale == 1024.0)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)


def updated(executor: Any) -> None:
    update = UpdateBatch([torch.ones(4, 3)], [[0]], 4, 0, False, denominator=1.0)
    executor.run_step(update, Step(executor))


class Routed(nn.Module):
    """Each batch names the layer that it passes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
        found: torch.Tensor = self.layers[batch[1]](batch[0])
        return found


class Reweighted(Step):
    def complete(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.tensor(0.5), {}


def test_a_gradient_of_an_earlier_micro_batch_alone_is_scaled_and_counted() -> None:
    found = []
    for kind, optimizer in ((FusedExecutor, Lomo), (NativeExecutor, torch.optim.SGD)):
        model: Any = Routed()
        made: Any = kind(Alone(model), optimizer(model.parameters(), lr=0.1), torch.device("cpu"))
        batches = [(torch.ones(4, 3), 0), (torch.ones(4, 3), 1)]
        result = made.run_step(UpdateBatch(batches, [[]] * 2, 8, 0, False, denominator=1.0), Reweighted(made))
        found.append([result.norm, *model.parameters()])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-7)


def test_frozen_parameters_of_the_optimizer_are_left_alone_until_they_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    other = copy.deepcopy(model)
    ours = FusedExecutor(Alone(model), Lomo(model.parameters(), lr=0.1), torch.device("cpu"))
    theirs = NativeExecutor(Alone(other), torch.optim.SGD(other.parameters(), lr=0.1), torch.device("cpu"))
    frozen = model[0].weight.clone()
    updated(ours)
    updated(theirs)
    assert torch.equal(model[0].weight, frozen)
    for each in (model, other):  # a callback may train further layers from some step on
        each.requires_grad_(True)
    updated(ours)
    updated(theirs)
    assert not torch.equal(model[0].weight, frozen)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-7)
