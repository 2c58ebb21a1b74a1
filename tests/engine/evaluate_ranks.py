"""Run on ranks: everything that evaluation promises of several processes, in one start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.evaluate_cases import (
    SIZES,
    TinyTagger,
    check_exact,
    collate,
    evaluate,
    evaluation_of,
    predict_step,
    shards,
    targets,
)

from windlass.core.errors import PeerError
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.wire import stream
from windlass.engine.evaluate import evaluation_loop
from windlass.engine.uneven_batches import pad_uneven_batches


def exact(model: TinyTagger, gang: Gang) -> None:
    for count in SIZES:
        for size in sorted({1, 2, 3, 5, 8, count}):
            if size <= count:
                check_exact(model, count, size, gang)


def small_messages(gang: Gang) -> None:
    """Chunks smaller than most tensors: many messages, the same outcome."""

    def sent(rank: int) -> list[torch.Tensor]:
        return [torch.arange(float(count)) + rank for count in (0, 1, 7, 8, 9, 40, 3, 3)][rank:]

    came = list(stream(sent(gang.rank), gang.host_group, chunk_bytes=64))
    expected = [(rank, index, t) for rank in range(gang.size) for index, t in enumerate(sent(rank))]
    assert [(rank, index) for rank, index, _ in came] == [(rank, index) for rank, index, _ in expected]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(came, expected, strict=True))


def order_without_positions(model: TinyTagger, gang: Gang) -> None:
    out = evaluate(model, 23, 2, gang, positions=False)
    assert out.num_samples == 23
    assert out.predictions[1].tolist() == list(range(23)), "batches in turn, rank by rank"


def token_rows(model: TinyTagger, gang: Gang) -> None:
    """Outputs flattened over tokens have no row per sample: whole batches keep the dataset's order."""
    short = {"preprocess_logits": lambda logits, labels: labels[labels != -100]}
    batches = [(ids, collate(ids)) for ids in shards(23, 2, gang.rank, gang.size)]
    out = evaluation_loop(batches, evaluation_of(predict_step(model), targets, **short), data_ranks=gang)
    whole = collate(list(range(23)))["labels"]
    assert out.predictions.tolist() == whole[whole != -100].tolist()


def batch_metrics(model: TinyTagger, gang: Gang) -> None:
    for count, size in ((1, 1), (5, 1), (23, 2), (97, 5)):
        seen: list[int] = []
        flags: list[bool] = []

        def metric(prediction: Any, compute_result: bool, seen=seen, flags=flags) -> dict[str, Any]:
            assert isinstance(prediction.predictions[1], torch.Tensor)
            seen.extend(prediction.predictions[1].tolist())
            flags.append(compute_result)
            return {"rows": len(seen)} if compute_result else {}

        out = evaluate(model, count, size, gang, compute_metrics=metric, batch_metrics=True)
        assert sorted(seen) == list(range(count))
        assert flags == [False] * (len(flags) - 1) + [True]
        assert len(flags) == -(-count // (size * gang.size))
        assert out.metrics["eval_rows"] == count
        assert out.predictions is None


def batch_metrics_in_step(model: TinyTagger, gang: Gang) -> None:
    """Ranks with other numbers of batches that meet before each of them: the rounds of a metric keep to that order."""
    mine = [([10 * gang.rank + n], collate([10 * gang.rank + n])) for n in range(1 + 2 * gang.rank)]
    seen: list[int] = []

    def metric(prediction: Any, compute_result: bool) -> dict[str, Any]:
        seen.extend(prediction.predictions[1].tolist())
        return {"rows": len(seen)} if compute_result else {}

    described = evaluation_of(
        predict_step(model), targets, compute_metrics=metric, batch_metrics=True, in_step=True
    )
    padded = pad_uneven_batches(mine, gang)
    out = evaluation_loop(padded, described, data_ranks=gang)
    assert sorted(seen) == sorted(10 * rank + n for rank in range(gang.size) for n in range(1 + 2 * rank))
    assert out.num_samples == out.metrics["eval_rows"] == len(seen)


def list_of_batches(model: TinyTagger, gang: Gang) -> None:
    out = evaluate(model, 11, 2, gang, concat=False)
    assert [labels.tolist() for labels in out.label_ids] == [
        collate(i)["labels"].tolist() for i in shards(11, 2, 0, 1)
    ]


def failure(gang: Gang) -> None:
    """One rank fails in the middle: it raises its own error, and the others stop with its words."""

    def step(batch: Any) -> Any:
        if gang.rank == 0 and 4 in batch["index"]:
            raise ArithmeticError("broken sample")
        return torch.tensor(1.0), None, None

    batches = [([0], collate([i])) for i in range(8)]
    expected = ArithmeticError if gang.rank == 0 else PeerError
    words = "broken sample" if gang.rank == 0 else "rank 0: ArithmeticError: broken sample"
    with pytest.raises(expected, match=words):
        evaluation_loop(batches, evaluation_of(step, targets, loss_only=True), data_ranks=gang)


def metric_failure(model: TinyTagger, gang: Gang, *, batchwise: bool) -> None:
    """A metric that fails on one rank stops all of them, at the end or between batches."""

    def metric(prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        if gang.rank == 1:
            raise ArithmeticError("broken metric")
        return {}

    with pytest.raises(ArithmeticError if gang.rank == 1 else PeerError, match="broken metric"):
        evaluate(model, 7, 1, gang, compute_metrics=metric, batch_metrics=batchwise)


def empty_everywhere(model: TinyTagger, gang: Gang) -> None:
    for options in ({}, {"batch_metrics": True}):
        assert evaluate(model, 0, 1, gang, compute_metrics=_must_not_be_called, **options) == (
            None,
            None,
            {},
            0,
        )


def _must_not_be_called(prediction: Any, compute_result: bool = True) -> dict[str, Any]:
    raise AssertionError("there is nothing to measure")


def short_types(gang: Gang) -> None:
    """Types of every width travel, a rank without rows included."""
    dtypes = (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    mine = [torch.full((gang.rank, 3), gang.rank).to(dtype) for dtype in dtypes]
    for rank, index, tensor in gang.stream(list(mine)):
        assert tensor.dtype == dtypes[index]
        assert torch.equal(tensor, torch.full((rank, 3), rank).to(dtypes[index]))


def main() -> list[float]:
    torch.set_num_threads(1)
    gang, model = join(world_from_environment(), torch.device("cpu")), TinyTagger()
    exact(model, gang)
    small_messages(gang)
    order_without_positions(model, gang)
    token_rows(model, gang)
    batch_metrics(model, gang)
    batch_metrics_in_step(model, gang)
    list_of_batches(model, gang)
    failure(gang)
    metric_failure(model, gang, batchwise=False)
    metric_failure(model, gang, batchwise=True)
    empty_everywhere(model, gang)
    short_types(gang)
    losses = [evaluate(model, 97, size, gang, loss_only=True).metrics["eval_loss"] for size in (1, 4, 97)]
    leave()
    return losses
