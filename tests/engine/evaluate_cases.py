"""A tiny ragged task, cut over ranks and batch sizes in every way; for the tests of one and of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.config.plan import EvaluationPlan
from windlass.dist.gang import Gang
from windlass.engine.evaluate import Evaluation, evaluation_loop
from windlass.transforms.alone import Alone

IGNORE = -100
VOCABULARY = 7
SIZES = (1, 2, 3, 5, 7, 97)
Batch = dict[str, Tensor]


class TinyTagger(nn.Module):
    """Token logits in fp64; the loss is the mean over targets, NaN if there are none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(
            torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.table[input_ids]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE), logits


def sample(index: int) -> list[int]:
    """Between one and five tokens; every fourth sample holds no target at all (see `collate`)."""
    return [(index * 3 + place) % VOCABULARY for place in range(1 + index % 5)]


def collate(ids: list[int]) -> Batch:
    width = max(len(sample(i)) for i in ids)
    tokens = torch.tensor([sample(i) + [0] * (width - len(sample(i))) for i in ids])
    labels = torch.full_like(tokens, IGNORE)
    for row, i in enumerate(ids):
        if i % 4 != 3:
            labels[row, : len(sample(i))] = (tokens[row, : len(sample(i))] + i) % VOCABULARY
    return {"input_ids": tokens, "labels": labels, "index": torch.tensor(ids)}


def shards(count: int, size: int, rank: int, world: int) -> Iterator[list[int]]:
    """Runs of `size` samples dealt to the ranks in turn: uneven in their number and in the last one's length."""
    for start in range(rank * size, count, world * size):
        yield list(range(start, min(start + size, count)))


def targets(batch: Batch) -> float:
    return float((batch["labels"] != IGNORE).sum())


def reference(model: TinyTagger, count: int) -> float:
    """The loss over all targets at once, sample by sample."""
    total, weight = 0.0, 0.0
    for i in range(count):
        batch = collate([i])
        logits = model.table[batch["input_ids"]].flatten(0, 1)
        total += functional.cross_entropy(
            logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        weight += targets(batch)
    return total / weight


def predict_step(model: TinyTagger) -> Any:
    def step(batch: Batch) -> tuple[Tensor, Any, Any]:
        with torch.no_grad():
            loss, logits = model(batch["input_ids"], batch["labels"])
        return loss, (logits, batch["index"]), batch["labels"]

    return step


def evaluation_of(step: Any, weigh: Any = lambda _: 1.0, **options: Any) -> Evaluation:
    """An evaluation in a world of one; `options` are those of `Evaluation` and of its plan."""
    planned = {
        name: options.pop(name)
        for name in EvaluationPlan.__slots__
        if name in options and name != "loss_only"
    }
    return Evaluation(Alone(torch.nn.Identity()), step, weigh, EvaluationPlan(**planned), **options)


def evaluate(
    model: TinyTagger, count: int, size: int, gang: Gang, *, positions: bool = True, **request: Any
) -> Any:
    batches = [(ids if positions else [], collate(ids)) for ids in shards(count, size, gang.rank, gang.size)]
    return evaluation_loop(batches, evaluation_of(predict_step(model), targets, **request), data_ranks=gang)


def check_exact(model: TinyTagger, count: int, size: int, gang: Gang) -> None:
    """Loss, order, exact sizes, padding, and metrics on all of it."""
    seen: list[int] = []

    def count_rows(prediction: Any) -> dict[str, Any]:
        (_, index), labels = prediction
        seen.extend(index.tolist())
        return {"rows": index.size, "targets": (labels != IGNORE).sum()}

    out = evaluate(model, count, size, gang, compute_metrics=count_rows)
    expected = reference(model, count)
    assert abs(out.metrics["eval_loss"] - expected) <= 1e-12, (count, size, out.metrics, expected)
    assert out.num_samples == count
    assert seen == list(range(count)), (count, size, seen)
    whole = collate(list(range(count)))
    assert out.metrics["eval_targets"] == int(targets(whole))
    assert out.label_ids.tolist() == whole["labels"].tolist()
    logits = out.predictions[0]
    assert logits.shape == (count, whole["input_ids"].shape[1], VOCABULARY)
    for i in range(count):
        width = len(sample(i))
        assert (logits[i, :width] == model.table.detach()[sample(i)].numpy()).all()
    loss_only = evaluate(model, count, size, gang, loss_only=True)
    assert loss_only.metrics == {"eval_loss": out.metrics["eval_loss"]}
    assert loss_only.predictions is None
