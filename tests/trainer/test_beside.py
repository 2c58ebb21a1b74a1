"""Models that a script prepares beside the trained one: `train()` leaves them alone, and they can be called."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import preference_trainer
from tests.trainer.preference_trainer import PreferenceTrainer, accuracy
from tests.trainer.small import Net, arguments, rows
from torch import Tensor, nn

from windlass import Trainer
from windlass.dist.sharded import is_sharded, whole

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": {"fsdp": "full_shard"}}
VOCABULARY, LENGTH, PAIRS = 11, 6, 44


class Bigrams(nn.Module):
    """Predicts each token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.embed(tokens)))
        return logits


def pairs(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Chosen sequences count upwards, rejected ones do not."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
    chosen = (starts + torch.arange(LENGTH)) % VOCABULARY
    rejected = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"chosen": c, "rejected": r} for c, r in zip(chosen, rejected, strict=True)]


def preferences(folder: Path, **way: Any) -> dict[str, Any]:
    """Evaluates before, in and after two calls of `train`, between which another reference is prepared."""
    model = Bigrams().double()
    args = arguments(
        folder, max_steps=6, per_device_train_batch_size=8 // WORLD, remove_unused_columns=False,
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=1, learning_rate=0.05,
        gradient_accumulation_steps=2, **way,
    )  # fmt: skip
    trainer = PreferenceTrainer(
        model, args, train_dataset=pairs(PAIRS), eval_dataset=pairs(7, seed=1), compute_metrics=accuracy
    )
    accelerator, reference = trainer.accelerator, trainer.ref_model
    found: dict[str, Any] = {"before": trainer.evaluate()}
    trainer.train()
    assert trainer.ref_model is reference
    assert any(is_sharded(p) for p in reference.parameters()) == bool(way)
    bare = accelerator.unwrap_model(reference)
    assert isinstance(bare, Bigrams)
    state = accelerator.get_state_dict(reference)
    if RANK == 0:
        fresh = Bigrams().double().state_dict()
        assert all(torch.equal(state[name], fresh[name]) for name in fresh), "the reference was trained"
    own = accelerator.get_state_dict(trainer.model)
    weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
    assert RANK != 0 or all(torch.equal(own[name], weights[name]) for name in weights), (
        "known after its run, too"
    )
    found["after"] = trainer.evaluate()
    trainer.ref_model = accelerator.prepare(Bigrams().double().requires_grad_(False))
    trainer.train()
    found["weights"] = [whole(p.detach()).tolist() for p in trainer.model.parameters()]
    return {name: stripped(values) for name, values in found.items()}


def stripped(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name in ("eval_loss", "eval_accuracy")}


class Judged(Trainer):
    """Trains a second model beside its own, with an optimizer of that model's own, in each step."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        if not torch.is_grad_enabled():
            return (outputs["loss"], outputs) if kwargs.get("return_outputs") else outputs["loss"]
        judge, optimizer = self.judge, self.judge_optimizer
        optimizer.zero_grad()
        nn.functional.mse_loss(judge(inputs["x"])["logits"], outputs["logits"].detach()).backward()
        optimizer.step()
        judge.requires_grad_(False)
        loss = outputs["loss"] + 0.1 * (judge(inputs["x"])["logits"] - outputs["logits"]).square().mean()
        judge.requires_grad_(True)
        return loss

    judge: Any
    judge_optimizer: Any


def trained_beside(folder: Path, **way: Any) -> dict[str, Any]:
    args = arguments(folder, max_steps=3, per_device_train_batch_size=8 // WORLD, **way)
    data = [{**row, "x": row["x"].double()} for row in rows(31)]
    trainer = Judged(Net().double(), args, train_dataset=data[:24], eval_dataset=data[24:])
    judge = Net(seed=9).double()
    judge.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
    judge.register_forward_pre_hook(lambda judge, inputs: judge.calls.add_(1) and None)
    before = judge.layer.weight.detach().clone()
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    trainer.judge, trainer.judge_optimizer = trainer.accelerator.prepare(judge, optimizer)
    trainer.train()
    trainer.evaluate()
    weights = [whole(p.detach()) for p in [*judge.parameters(), judge.calls]]
    assert not torch.equal(weights[0], before), "the model beside was not trained"
    return {"weights": [weight.tolist() for weight in weights]}


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("beside")
    first, second = on_ranks(2, main, folder)
    assert first == second, "ranks disagree"
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return preferences(tmp_path_factory.mktemp("alone"))


def test_preferences_are_learned(alone: dict[str, Any]) -> None:
    assert alone["before"]["eval_loss"] == pytest.approx(0.6931471805599453), "the model is its own reference"
    assert alone["after"]["eval_loss"] < 0.5
    assert alone["after"]["eval_accuracy"] == 1.0


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_the_same(said: dict[str, Any], alone: dict[str, Any], way: str) -> None:
    found = said[f"preferences {way}"]
    for when in ("before", "after"):
        assert found[when] == pytest.approx(alone[when], rel=1e-12)
    same_weights(found["weights"], alone["weights"])


def same_weights(found: list[Any], wanted: list[Any]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        one, other = (torch.tensor(weight, dtype=torch.float64) for weight in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_a_second_model_is_trained_beside(said: dict[str, Any], tmp_path: Path, way: str) -> None:
    """Work that is discarded before the first update does not train it either."""
    same_weights(said[f"trained_beside {way}"]["weights"], trained_beside(tmp_path)["weights"])


def test_the_script_is_short_and_uses_public_names() -> None:
    text = Path(preference_trainer.__file__).read_text()
    assert len(text.splitlines()) < 150
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert not {name for name in names if name.startswith("_") and name != "__init__"}


def main(folder: Path) -> dict[str, Any]:
    found = {
        f"{case.__name__} {name}": case(folder / name / case.__name__, **way)
        for name, way in WAYS.items()
        for case in (preferences, trained_beside)
    }
    torch.distributed.destroy_process_group()
    return found
