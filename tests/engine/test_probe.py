"""What a loss is a mean over is measured: by what the loss does, whatever it is called."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.engine import probe
from windlass.engine.probe import Probe
from windlass.metrics.tokens import TargetCounter

CPU = torch.device("cpu")
BATCH = {
    "input_ids": torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]]),
    "labels": torch.tensor([[1, 2, 3, 4], [4, 3, -100, 1]]),
}
TARGETS = 7.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 6)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def losses(self, batch: Any, shift: bool) -> Tensor:
        logits, labels = self.drop(self.norm(self.embed(batch["input_ids"]))), batch["labels"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, 6), labels.reshape(-1)
        return nn.functional.cross_entropy(*flat, reduction="none")[flat[1] != -100]


def alone(value: Tensor) -> Tensor:
    return value


def probe_of(model: Model, world: int = 1) -> Probe:
    """As `world` ranks with the same batch would find."""
    return Probe(model.eval(), CPU, lambda value: value * world)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("empty", ["nan", "zero"])
def test_shifting_is_seen(shift: bool, empty: str) -> None:
    model = Model()

    def loss(batch: Any) -> Tensor:
        values = model.losses(batch, shift)
        return values.mean() if empty == "nan" else values.sum() / max(len(values), 1)

    assert probe_of(model).shifts_labels(BATCH, TargetCounter(), loss) is shift


def labels_after_the_first(batch: Any) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize(
    ("count", "shifted"),
    [
        (labels_after_the_first, True),
        (lambda batch: float((batch["labels"] != -100).sum()), False),
        (lambda batch: float(len(batch["labels"])), False),
        (lambda batch: 0.0, False),
    ],
)
def test_a_count_of_the_scripts_shows_if_the_first_label_is_a_target(count: Any, shifted: bool) -> None:
    assert probe_of(Model()).counts_shifted(BATCH, TargetCounter(), count) is shifted


def test_a_batch_without_labels_shows_nothing() -> None:
    for batch in (None, {"x": torch.ones(2)}):
        assert probe_of(Model()).counts_shifted(batch, TargetCounter(), labels_after_the_first) is False


@pytest.mark.parametrize(
    "batch",
    [
        None,
        {"labels": torch.tensor([1, 2])},
        {"labels": torch.tensor([[0.5, 1.0]])},
        {"labels": torch.full((2, 3), -100)},
        {**BATCH, "shift_labels": BATCH["labels"]},
        {"x": torch.ones(2)},
    ],
)
def test_where_nothing_can_be_asked_nothing_shifts(batch: Any) -> None:
    def loss(batch: Any) -> Tensor:
        raise AssertionError("asked")

    assert probe_of(Model()).shifts_labels(batch, TargetCounter(), loss) is False


def test_a_rank_without_targets_does_not_decide() -> None:
    """Its loss is NaN; the other ranks' answers, summed with it, stand."""
    seen: list[Tensor] = []

    def other_ranks(value: Tensor) -> Tensor:
        seen.append(value)
        return value + torch.tensor([2.0], dtype=torch.float64)

    probe = Probe(Model(), CPU, other_ranks)
    without = {**BATCH, "labels": torch.full((2, 4), -100)}
    assert probe.shifts_labels(without, TargetCounter(), lambda batch: torch.tensor(float("nan"))) is True
    assert [value.item() for value in seen] == [0.0, 0.0]


def test_a_rank_that_fails_alone_says_why_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks meet in their forwards, the others wait there for this one."""
    monkeypatch.setattr(probe, "PATIENCE", 0.01)
    spoken, said = threading.Event(), []
    monkeypatch.setattr(probe.logger, "error", lambda *values: (said.append(values[-1]), spoken.set()))
    others_come = iter([True, False])

    def sum_over_ranks(value: Tensor) -> Tensor:
        if not next(others_come):
            assert spoken.wait(60)
            raise RuntimeError("timed out waiting for recv")
        return value

    def fails(batch: Any) -> Tensor:
        raise ValueError("token 9 of a vocabulary of 6")

    with pytest.raises(ValueError, match="token 9"):
        Probe(Model().eval(), CPU, sum_over_ranks).splits(BATCH, fails, TargetCounter(), 1e-5)
    assert [str(error) for error in said] == ["token 9 of a vocabulary of 6"]


def test_an_experiment_that_is_broken_off_leaves_no_trace() -> None:
    model = nn.BatchNorm1d(2)

    def broken_off(batch: Any) -> Tensor:
        model(torch.ones(3, 2))
        raise KeyboardInterrupt

    probe = Probe(model, torch.device("cpu"), alone)
    with pytest.raises(KeyboardInterrupt):
        probe.shifts_labels(BATCH, TargetCounter(), broken_off)
    assert int(model.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_an_experiment_leaves_no_trace() -> None:
    model = Model().train()
    probe = Probe(model, CPU, alone)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    batch = {name: value.clone() for name, value in BATCH.items()}
    state = torch.get_rng_state()

    def loss(inputs: Any) -> Tensor:
        value = model.losses(inputs, True).mean()
        inputs.pop("labels")  # hooks may
        return value

    probe.splits(batch, loss, TargetCounter(), 1e-9)
    probe.shifts_labels(batch, TargetCounter(), loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(batch[name], value) for name, value in BATCH.items())


class PreparesItself(nn.Module):
    """Prepares itself at its first forward, as many models of transformers do; works only if it does so once.

    Args:
        notes: where it notes that it has done so; None: in itself.
    """

    def __init__(self, notes: Any = None) -> None:
        super().__init__()
        self.notes = notes
        self.inner = nn.Linear(2, 2, bias=False)
        self.inner.tables = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        notes = self if self.notes is None else self.notes
        if not getattr(notes, "is_ready", False):
            notes.is_ready = True
            self.inner.register_forward_pre_hook(lambda module, inputs: inputs[0] + 1)
            self.inner.register_forward_hook(lambda module, inputs, output: output * 2, always_call=True)
            self.inner.register_buffer("scale", torch.ones(1), persistent=False)
            self.inner.register_module("further", nn.Linear(2, 1))
            self.register_state_dict_pre_hook(lambda *_: None)
        self.inner.tables["calls"] += 1
        return self.inner(x) * self.inner.scale


@pytest.mark.parametrize("notes", [None, SimpleNamespace(sizes=[1])])  # the second as a configuration
def test_a_model_that_prepares_itself_at_its_first_forward_does_so_once(notes: Any) -> None:
    torch.manual_seed(0)
    model, x = PreparesItself(notes), torch.ones(3, 2)
    fresh = copy.deepcopy(model)
    for _ in range(2):
        Probe(model, CPU, alone).value(x, lambda batch: model(batch).sum())
    tables = [
        {name: {**value} for name, value in vars(part).items() if isinstance(value, dict)}
        for part in (model, model.inner)
    ]
    assert all(not hooks for part in tables for name, hooks in part.items() if "hooks" in name)
    assert list(model.inner._non_persistent_buffers_set) == []
    assert torch.equal(model(x), fresh(x))
    assert model.inner.tables == fresh.inner.tables == {"calls": 1}
