"""How the losses of halves make the loss of a batch: measured, not read off a model's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.engine.probe import Probe
from windlass.engine.splitting import Kind, Split, halves
from windlass.engine.undisturbed import undisturbed
from windlass.metrics.tokens import TargetCounter

CPU = torch.device("cpu")
IDS = torch.arange(20).reshape(4, 5)
BATCH = {"ids": IDS, "labels": IDS % 3, "scale": 2.0, "texts": list("abcd")}


class Model(nn.Module):
    """A loss of which `form` says what it is over. It counts its calls, caches, and may have batch statistics."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.calls, self.cache = form, 0, {}  # type: ignore[var-annotated]
        self.body, self.drop = nn.Embedding(20, 3), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(5) if form == "norm" else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def loss(self, batch: Any) -> Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + 1
        self.cache[self.calls] = batch
        logits, labels = self.drop(self.norm(self.body(batch["ids"]))), batch["labels"]
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        valid = labels != -100
        if self.form == "sum":
            return each.sum()
        if self.form == "rows":
            return (each.sum(1) / valid.sum(1)).mean()
        mean = each.sum() / valid.sum()
        return mean + 0.01 * self.body(batch["ids"]).mean().square() if self.form == "aux" else mean


def split_of(form: str, batch: Any = None) -> Split:
    model = Model(form).train()
    return Probe(model, CPU, lambda value: value).splits(batch or BATCH, model.loss, TargetCounter(), 1e-9)


@pytest.mark.parametrize(("form", "kind"), [("mean", Kind.TARGETS), ("rows", Kind.ROWS), ("sum", Kind.SUM)])
def test_sums_and_both_means_are_told_apart(form: str, kind: Kind) -> None:
    found = split_of(form)
    assert (found.kind, found.exact) == (kind, True)
    assert found.deviation is not None
    assert found.deviation < 1e-12


@pytest.mark.parametrize("form", ["aux", "norm"])
def test_a_loss_that_does_not_split_says_by_how_much(form: str) -> None:
    found = split_of(form)
    assert (found.kind, found.exact) == (Kind.TARGETS, False)
    assert found.deviation is not None
    assert 1e-9 < found.deviation < 0.5


def test_one_row_is_doubled() -> None:
    one = {"ids": IDS[:1], "labels": IDS[:1] % 3}
    assert split_of("sum", one).kind is Kind.SUM
    for form in ("mean", "rows"):
        found = split_of(form, one)
        assert (found.kind, found.exact) == (Kind.TARGETS, True), "one row does not tell the means apart"


@pytest.mark.parametrize(
    "odd", [{"patches": torch.ones(7, 2)}, {"texts": ["a"]}, {"nested": {"x": IDS}}, {"ids": None}]
)
def test_a_batch_of_another_structure_is_not_split(odd: Any) -> None:
    batch = {**BATCH, **odd}
    if batch["ids"] is None:
        batch = {"n": 3}
    assert halves(batch, TargetCounter()) is None
    assert split_of("sum", batch) == Split()


def test_ranks_measure_together_or_not_at_all() -> None:
    """Where another rank's batch cannot be split, none is."""
    model = Model("sum")
    asked: list[list[float]] = []

    def two_ranks(value: Tensor) -> Tensor:
        asked.append(value.tolist())
        return value + torch.tensor([0.0, 1.0])

    assert Probe(model, CPU, two_ranks).splits(BATCH, model.loss, TargetCounter(), 1e-9) == Split()
    assert asked == [[1.0, 1.0]]
    assert model.calls == 0


def test_a_model_is_left_as_it_was() -> None:
    model = Model("norm").train()
    model.drop.eval()
    cache, seen, random = model.cache, model.seen, torch.get_rng_state()
    Probe(model, CPU, lambda value: value).splits(BATCH, model.loss, TargetCounter(), 1e-9)
    with undisturbed(model, CPU):
        model.new, model.norm = 1, nn.Identity()
        model.eval()
        del model.form
    assert (model.calls, model.cache, model.form) == (0, {}, "norm")
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert int(model.norm.num_batches_tracked) == 0
    assert model.cache is cache
    assert model.seen is seen
    assert (model.training, model.drop.training) == (True, False)
    assert not hasattr(model, "new")
    assert torch.equal(random, torch.get_rng_state())
