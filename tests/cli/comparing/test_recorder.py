"""What the recorder makes of forwards, backwards and steps of PyTorch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from windlass.cli.comparing.recorder import Recorder


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder({"updates": 9, "folder": str(tmp_path)})


def written(recorder: Recorder) -> dict[str, Any]:
    recorder.write()
    return json.loads((Path(recorder.settings["folder"]) / "record.json").read_text("utf-8"))


def test_an_update_has_the_sum_of_its_losses_and_the_norm_of_its_gradients(recorder: Recorder) -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for row in ([1.0, 0.0], [0.0, 2.0]):
        x = torch.tensor([row])
        recorder.called(layer, (x,), {})
        loss = layer(x).sum() / 2
        recorder.backward(loss, None)
        loss.backward()
    recorder.before_step(optimizer)
    optimizer.step()
    recorder.after_step(optimizer)
    (update,) = written(recorder)["updates"]
    assert update["norm"] == pytest.approx((0.5**2 + 1.0**2) ** 0.5)
    assert update["rates"] == [0.5]
    assert [len(rows) for rows in update["rows"]] == [1, 1]
    assert list(update["digests"]) == ["weight"]
    kept = load_file(Path(recorder.settings["folder"]) / "weights.safetensors")
    assert torch.equal(kept["weight"], layer.weight)


def test_a_row_is_its_tokens_whatever_it_is_padded_to(recorder: Recorder) -> None:
    layer = nn.Embedding(9, 2)
    short = {"input_ids": torch.tensor([[4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    long = {"input_ids": torch.tensor([[4, 5, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    other = {"input_ids": torch.tensor([[5, 4, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    rows = []
    for batch in (short, long, other):
        recorder.called(layer, (), batch)
        recorder.backward(torch.zeros(()), None)
        rows.append(recorder.pending_rows[-1])
    assert rows[0] == rows[1] != rows[2]


def test_evaluations_and_what_is_recomputed_in_a_backward_are_no_rows(recorder: Recorder) -> None:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        recorder.called(layer, (torch.ones(1, 2),), {})
    layer.eval()
    recorder.called(layer, (torch.ones(1, 2),), {})
    layer.train()
    recorder.inside_backward = True
    recorder.called(layer, (torch.ones(1, 2),), {})
    recorder.backward(torch.zeros(()), None)
    assert recorder.pending_rows == [[]]


def test_two_optimizers_without_a_backward_between_them_are_one_update(recorder: Recorder) -> None:
    parts = [nn.Linear(2, 1), nn.Linear(1, 1)]
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(parts, (0.1, 0.2), strict=True)
    ]
    for _ in range(2):
        recorder.backward(torch.ones(()), None)
        for optimizer in optimizers:
            recorder.before_step(optimizer)
            recorder.after_step(optimizer)
    assert [update["rates"] for update in written(recorder)["updates"]] == [[0.1, 0.2]] * 2


def test_an_update_lasts_from_its_first_forward_to_the_step_of_its_last_optimizer(recorder: Recorder) -> None:
    parts = [nn.Linear(2, 1), nn.Linear(1, 1)]
    recorder.called(parts[0], (torch.ones(1, 2),), {})
    began = time.perf_counter()
    torch.linalg.svd(torch.rand(150, 150))
    ended = time.perf_counter()
    recorder.backward(torch.ones(()), None)
    for part in parts:
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        recorder.before_step(optimizer)
        recorder.after_step(optimizer)
    (update,) = written(recorder)["updates"]
    assert update["seconds"] >= ended - began


def test_rows_are_of_the_model_and_not_of_what_gets_its_output(recorder: Recorder) -> None:
    model, head, loss = nn.Linear(2, 2), nn.Linear(2, 2), nn.MSELoss()
    x = torch.ones(3, 2)
    for _ in range(2):  # of two answers, say
        recorder.called(model, (x,), {})
        recorder.called(head, (model(x),), {})
    recorder.called(loss, (head(model(x)), x), {})
    recorder.backward(torch.ones(()), None)
    recorder.called(model, (x,), {})
    recorder.backward(torch.ones(()), None)
    twice, once = recorder.pending_rows
    assert len(once) == 3
    assert twice == once * 2


def test_a_row_is_the_same_without_a_mask_that_keeps_all_of_it(recorder: Recorder) -> None:
    layer, tokens = nn.Embedding(9, 2), torch.tensor([[4, 5, 6]])
    for batch in ({"input_ids": tokens}, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}):
        recorder.called(layer, (), batch)
        recorder.backward(torch.zeros(()), None)
    assert recorder.pending_rows[0] == recorder.pending_rows[1]


def test_a_gradient_that_a_backward_is_given_scales_the_loss(recorder: Recorder) -> None:
    recorder.backward(torch.tensor(3.0), torch.tensor(0.5))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    recorder.before_step(optimizer)
    recorder.after_step(optimizer)
    assert written(recorder)["updates"][0]["loss"] == 1.5


@dataclass
class Base:
    rate: float = 0.1
    steps: int = 3


@dataclass
class Derived(Base):
    length: int = 8
    packs: bool = False


def test_what_was_set_and_is_not_read_is_known_of_derived_classes_too(recorder: Recorder) -> None:
    class Watched(Derived):
        """So that what the recorder replaces is not that of the other tests."""

    recorder.watch_reads(Watched)
    recorder.arguments = arguments = Watched(rate=0.5, steps=4, length=16, packs=True)
    assert recorder.unread() == ["length", "packs", "rate", "steps"]
    assert arguments.length + arguments.rate > 0
    assert recorder.unread() == ["packs", "steps"]


def test_a_class_derived_from_the_watched_one_has_fields_of_its_own(recorder: Recorder) -> None:
    class Watched(Base):
        """As above."""

    @dataclass
    class Below(Watched):
        length: int = 8

    recorder.watch_reads(Watched)
    recorder.arguments = arguments = Below(length=16)
    assert recorder.unread() == ["length"]
    assert arguments.length == 16
    assert recorder.unread() == []
