"""Real models of transformers: one batch of 8 trains as micro-batches of (4, 2) do, whatever the loss is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import loss_families
from tests.trainer.loss_families import train, trainer_of

from windlass import Trainer

# How exactly a model of transformers computes its loss: CTC and language models do so in fp32, whatever they are in.
EXACT = {"wav2vec2-sum": 1e-6, "wav2vec2-mean": 1e-6, "llama": 1e-6, "bert": 1e-12}
# A mean that is computed in fp32 is divided by its count there, so gradients are rounded as the loss is.
SCALED_IN_FP32 = {"llama": {"rtol": 1e-6, "atol": 1e-9}}
WEIGHTS = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("name", EXACT)
def test_every_split_of_a_batch_trains_the_same(name: str, tmp_path: Path) -> None:
    weights, losses, evaluated = train(name, tmp_path / "one", 8, 1)
    other, other_losses, other_evaluated = train(name, tmp_path / "many", 2, 4)
    torch.testing.assert_close(other, weights, rtol=1e-12, atol=1e-12)
    assert other_losses == pytest.approx(losses, rel=EXACT[name])
    assert other_evaluated == pytest.approx(evaluated, rel=EXACT[name])


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_the_same(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, loss_families.main, tmp_path, strategy, list(EXACT))
    for name in EXACT:
        weights, losses, evaluated = train(name, tmp_path / name / "one", 8, 1)
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        torch.testing.assert_close(found["weights"], weights, **SCALED_IN_FP32.get(name, WEIGHTS))
        assert found["losses"] == pytest.approx(losses, rel=EXACT[name])
        assert found["evaluated"] == pytest.approx(evaluated, rel=EXACT[name])


@pytest.mark.parametrize("name", ["clip", "mixtral", "resnet"])
def test_a_loss_that_does_not_split_is_said_once_with_its_deviation(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    train(name, tmp_path, 4, 2)
    said = capsys.readouterr().err
    assert said.count("does not follow from the losses of its halves: it differs by") == 1


def test_with_one_micro_batch_nothing_is_said(tmp_path: Path, capsys: Any) -> None:
    train("clip", tmp_path, 8, 1)
    assert "halves" not in capsys.readouterr().err


def test_a_sum_is_evaluated_by_its_targets(tmp_path: Path) -> None:
    """Outside training too: the same number for every batch size."""
    values = []
    for size in (8, 3):
        trainer = trainer_of("wav2vec2-sum", tmp_path, 8, 1, per_device_eval_batch_size=size)
        values.append(trainer.evaluate()["eval_loss"])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


class Opaque(torch.nn.Module):
    """A wrapper as scripts write them: it hands on whatever it is given."""

    def __init__(self, inner: Any, beside: bool = False) -> None:
        super().__init__()
        self.inner = inner
        if beside:
            self.beside = torch.nn.Linear(1, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert", "wav2vec2-sum"])
def test_a_wrapper_gets_the_count_only_if_the_model_behind_it_takes_it(
    name: str, beside: bool, tmp_path: Path
) -> None:
    weights, losses, _ = train(name, tmp_path / "bare", 2, 4)
    other, other_losses, _ = train(name, tmp_path / "wrapped", 2, 4, wrap=lambda model: Opaque(model, beside))
    torch.testing.assert_close(other[: len(weights)], weights, rtol=1e-12, atol=1e-12)
    assert other_losses == pytest.approx(losses, rel=EXACT[name])


def test_a_compiled_model_is_looked_through(tmp_path: Path) -> None:
    compiled = trainer_of("bert", tmp_path, 2, 4, wrap=lambda m: torch.compile(m, backend="eager"))
    plain = trainer_of("bert", tmp_path, 2, 4)
    assert compiled.label_names == plain.label_names
    assert compiled.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs


class Pairwise(Trainer):
    """A loss over pairs, whose batches the model itself does not take; it counts its calls."""

    calls = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.calls += 1
        better, worse = (model(input_ids=inputs[name]).logits[:, 0] for name in ("chosen", "rejected"))
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        return (loss, {"scores": better}) if return_outputs else loss


def test_a_loss_of_the_scripts_is_called_for_training_alone(tmp_path: Path) -> None:
    """No measurement calls it, and a batch that the model itself does not take is not an obstacle."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 20, (16, 2, 6), generator=generator)
    data = [{"chosen": pair[0], "rejected": pair[1]} for pair in ids]
    trainer = trainer_of(
        "bert", tmp_path, 2, 2, kind=Pairwise, data=data, max_steps=3, remove_unused_columns=False
    )
    trainer.train()
    assert isinstance(trainer, Pairwise)
    assert trainer.calls == 6
