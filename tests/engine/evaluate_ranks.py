"""Run by `torch.distributed.run`: everything that evaluation promises of several processes, in one start."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.evaluate_cases import (
    SIZES,
    TinyTagger,
    check_exact,
    collate,
    evaluate,
    predict_step,
    shards,
    targets,
)

from windlass.core.errors import DataError
from windlass.engine.evaluate import EvalRequest, evaluation_loop
from windlass.metrics.gather import PeerError, ProcessGroupGather


def exact(model: TinyTagger, group: ProcessGroupGather) -> None:
    for count in SIZES:
        for size in sorted({1, 2, 3, 5, 8, count}):
            if size <= count:
                check_exact(model, count, size, group)


def small_messages(model: TinyTagger) -> None:
    """Chunks smaller than most tensors: many messages, the same outcome."""
    check_exact(model, 23, 2, ProcessGroupGather(chunk_bytes=64))


def order_without_positions(model: TinyTagger, group: ProcessGroupGather) -> None:
    out = evaluate(model, 23, 2, group, positions=False)
    assert out.num_samples == 23
    assert out.predictions[1].tolist() == list(range(23)), "batches in turn, rank by rank"


def token_rows(model: TinyTagger, group: ProcessGroupGather) -> None:
    """Outputs flattened over tokens have no row per sample: whole batches keep the dataset's order."""
    request = EvalRequest(preprocess_logits=lambda logits, labels: labels[labels != -100])
    batches = [(ids, collate(ids)) for ids in shards(23, 2, group.rank, group.size)]
    out = evaluation_loop(batches, predict_step(model), request, weigh=targets, group=group)
    whole = collate(list(range(23)))["labels"]
    assert out.predictions.tolist() == whole[whole != -100].tolist()


def batch_metrics(model: TinyTagger, group: ProcessGroupGather) -> None:
    for count, size in ((1, 1), (5, 1), (23, 2), (97, 5)):
        seen: list[int] = []
        flags: list[bool] = []

        def metric(prediction: Any, compute_result: bool, seen=seen, flags=flags) -> dict[str, Any]:
            assert isinstance(prediction.predictions[1], torch.Tensor)
            seen.extend(prediction.predictions[1].tolist())
            flags.append(compute_result)
            return {"rows": len(seen)} if compute_result else {}

        out = evaluate(model, count, size, group, compute_metrics=metric, batch_metrics=True)
        assert sorted(seen) == list(range(count))
        assert flags == [False] * (len(flags) - 1) + [True]
        assert len(flags) == -(-count // (size * group.size))
        assert out.metrics["eval_rows"] == count
        assert out.predictions is None


def list_of_batches(model: TinyTagger, group: ProcessGroupGather) -> None:
    out = evaluate(model, 11, 2, group, concat=False)
    assert [labels.tolist() for labels in out.label_ids] == [
        collate(i)["labels"].tolist() for i in shards(11, 2, 0, 1)
    ]


def failure(group: ProcessGroupGather) -> None:
    """One rank fails in the middle: it raises its own error, and the others stop with its words."""

    def step(batch: Any) -> Any:
        if group.rank == 0 and 4 in batch["index"]:
            raise ArithmeticError("broken sample")
        return torch.tensor(1.0), None, None

    batches = [([0], collate([i])) for i in range(8)]
    expected = ArithmeticError if group.rank == 0 else PeerError
    words = "broken sample" if group.rank == 0 else "rank 0: ArithmeticError: broken sample"
    with pytest.raises(expected, match=words):
        evaluation_loop(batches, step, EvalRequest(loss_only=True), weigh=targets, group=group)


def metric_failure(model: TinyTagger, group: ProcessGroupGather, *, batchwise: bool) -> None:
    """A metric that fails on one rank stops all of them, at the end or between batches."""

    def metric(prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        if group.rank == 1:
            raise ArithmeticError("broken metric")
        return {}

    with pytest.raises(ArithmeticError if group.rank == 1 else PeerError, match="broken metric"):
        evaluate(model, 7, 1, group, compute_metrics=metric, batch_metrics=batchwise)


def empty_everywhere(model: TinyTagger, group: ProcessGroupGather) -> None:
    with pytest.raises(DataError, match="empty"):
        evaluate(model, 0, 1, group)


def short_types(group: ProcessGroupGather) -> None:
    """Types of every width travel, a rank without rows included."""
    dtypes = (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    mine = [torch.full((group.rank, 3), group.rank).to(dtype) for dtype in dtypes]
    for rank, index, tensor in group.stream(list(mine)):
        assert tensor.dtype == dtypes[index]
        assert torch.equal(tensor, torch.full((rank, 3), rank).to(dtypes[index]))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, model = ProcessGroupGather(), TinyTagger()
    exact(model, group)
    small_messages(model)
    order_without_positions(model, group)
    token_rows(model, group)
    batch_metrics(model, group)
    list_of_batches(model, group)
    failure(group)
    metric_failure(model, group, batchwise=False)
    metric_failure(model, group, batchwise=True)
    empty_everywhere(model, group)
    short_types(group)
    losses = [evaluate(model, 97, size, group, loss_only=True).metrics["eval_loss"] for size in (1, 4, 97)]
    if group.rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(losses, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
