"""Evaluation: exact for every batch size and rank count, flat in memory, linear in copies."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dist.launch import on_ranks
from tests.engine import evaluate_ranks
from tests.engine.evaluate_cases import (
    SIZES,
    TinyTagger,
    check_exact,
    collate,
    evaluate,
    evaluation_of,
    predict_step,
    reference,
    shards,
    targets,
)
from torch import Tensor

from windlass.core.errors import ConfigError, DataError, ModelError
from windlass.core.types import LossTerms
from windlass.dist.gang import Gang
from windlass.engine.evaluate import evaluation_loop


@pytest.fixture(scope="module")
def model() -> TinyTagger:
    return TinyTagger()


@pytest.mark.parametrize("count", SIZES)
def test_every_batch_size_gives_the_same(model: TinyTagger, count: int) -> None:
    for size in range(1, count + 1) if count < 10 else (1, 2, 3, 5, 16, 96, 97):
        check_exact(model, count, size, Gang())


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_with_one_process(world: int) -> None:
    losses = on_ranks(world, evaluate_ranks.main)[0]
    expected = reference(TinyTagger(), 97)
    assert all(abs(loss - expected) <= 1e-12 for loss in losses)


@given(order=st.permutations(range(17)), cuts=st.sets(st.integers(1, 16)))
def test_rows_come_in_the_order_of_the_dataset(order: list[int], cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), 17]
    runs = [order[a:b] for a, b in pairwise(edges)]
    batches = [(list(ids), collate(list(ids))) for ids in runs]
    tagger = TinyTagger()
    out = evaluation_loop(batches, evaluation_of(predict_step(tagger), targets, accumulate_steps=2))
    assert out.predictions[1].tolist() == list(range(17))
    assert abs(out.metrics["eval_loss"] - reference(tagger, 17)) <= 1e-12


def losses_of(*losses: Any, weights: list[float] | None = None) -> dict[str, Any]:
    """Metrics of an evaluation whose batches give these losses."""
    weight = iter(weights or [1.0] * len(losses))
    given = iter(losses)
    batches = [([i], {"x": torch.zeros(1)}) for i in range(len(losses))]
    described = evaluation_of(lambda _: (next(given), None, None), lambda _: next(weight), loss_only=True)
    return evaluation_loop(batches, described).metrics


def test_a_batch_without_targets_counts_nothing() -> None:
    nan = torch.tensor(math.nan)
    assert losses_of(torch.tensor(2.0), nan, torch.tensor(4.0), weights=[3.0, 0.0, 1.0]) == {"eval_loss": 2.5}


def test_a_loss_that_is_nan_is_shown() -> None:
    assert math.isnan(losses_of(torch.tensor(2.0), torch.tensor(math.nan))["eval_loss"])
    assert losses_of(torch.tensor(2.0), torch.tensor(math.inf))["eval_loss"] == math.inf


def test_no_target_at_all_is_undefined() -> None:
    assert math.isnan(losses_of(torch.tensor(math.nan), weights=[0.0])["eval_loss"])


def test_loss_terms_are_exact_and_their_parts_named() -> None:
    first = LossTerms(torch.tensor(6.0), 3.0, {"balance": torch.tensor(0.5)})
    second = LossTerms(torch.tensor(1.0), torch.tensor(1.0), {"balance": torch.tensor(1.5)})
    empty = LossTerms(torch.tensor(math.nan), 0.0, {"balance": torch.tensor(1.0)})
    assert losses_of(first, second, empty) == {"eval_loss": 7 / 4 + 1.0, "eval_balance": 1.0}


def test_some_batches_without_loss_are_refused() -> None:
    with pytest.raises(ModelError, match="1 of 2 evaluation batches have no loss"):
        losses_of(torch.tensor(1.0), None)


def test_structure_is_kept_and_short_floats_become_float32() -> None:
    def step(batch: Any) -> Any:
        half = batch["x"].to(torch.bfloat16)
        return None, {"a": half, "b": (batch["x"], [batch["x"] > 1])}, (batch["x"], batch["x"])

    batches = [([i], {"x": torch.full((1, 2), float(i))}) for i in range(3)]
    out = evaluation_loop(batches, evaluation_of(step, prefix="test"))
    assert out.predictions["a"].dtype == np.float32
    assert isinstance(out.predictions["b"], tuple)
    assert out.predictions["b"][1][0].tolist() == [[False] * 2, [False] * 2, [True] * 2]
    assert isinstance(out.label_ids, tuple)
    assert out.metrics == {}


def test_reused_buffers_do_not_overwrite_what_was_kept() -> None:
    buffer = torch.zeros(1)

    def step(batch: Any) -> Any:
        buffer.copy_(batch["x"])
        return None, buffer, None

    batches = [([i], {"x": torch.tensor([float(i)])}) for i in range(4)]
    assert evaluation_loop(batches, evaluation_of(step)).predictions.tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_metrics_become_python_numbers_with_the_prefix_once(model: TinyTagger) -> None:
    def metric(_: Any) -> dict[str, Any]:
        return {
            "f1": np.float32(0.5),
            "test_hits": torch.tensor(3),
            "each": np.array([1, 2]),
            "deep": {"a": np.int64(1)},
        }

    out = evaluate(model, 5, 2, Gang(), compute_metrics=metric, prefix="test")
    assert json.loads(json.dumps(out.metrics)) == out.metrics
    assert {k: v for k, v in out.metrics.items() if k != "test_loss"} == {
        "test_f1": 0.5, "test_hits": 3, "test_each": [1, 2], "test_deep": {"a": 1},
    }  # fmt: skip
    assert type(out.metrics["test_hits"]) is int


def test_a_metric_cannot_hide_the_loss(model: TinyTagger, capsys: pytest.CaptureFixture[str]) -> None:
    out = evaluate(model, 5, 2, Gang(), compute_metrics=lambda _: {"loss": -1.0})
    assert abs(out.metrics["eval_loss"] - reference(model, 5)) <= 1e-12
    assert "eval_loss" in capsys.readouterr().err


def test_inputs_and_losses_reach_the_metric(model: TinyTagger) -> None:
    seen: dict[str, Any] = {}

    def metric(prediction: Any) -> dict[str, Any]:
        seen.update(inputs=prediction.inputs, losses=prediction.losses)
        return {}

    evaluate(model, 5, 2, Gang(), compute_metrics=metric, include=("inputs", "loss"))
    assert seen["inputs"].shape == (5, 5)
    assert seen["losses"].shape == (5,)
    assert seen["losses"][0] == seen["losses"][1]


def test_logits_are_reduced_before_they_are_kept(model: TinyTagger) -> None:
    def best(logits: Any, labels: Tensor) -> Tensor:
        assert labels.shape == logits[0].shape[:2]
        return logits[0].argmax(-1)

    out = evaluate(model, 7, 3, Gang(), preprocess_logits=best)
    assert out.predictions.shape == (7, 5)
    assert out.predictions[0, 4] == -100


def test_a_list_of_batches_where_they_are_not_to_be_joined(model: TinyTagger) -> None:
    out = evaluate(model, 5, 2, Gang(), concat=False)
    assert [len(labels) for labels in out.label_ids] == [2, 2, 1]
    assert [logits.shape[1] for logits, _ in out.predictions] == [2, 4, 5]


def test_batch_metrics_see_each_batch_once(model: TinyTagger) -> None:
    calls: list[tuple[list[int], bool]] = []

    def metric(prediction: Any, compute_result: bool) -> dict[str, float]:
        calls.append((prediction.predictions[1].tolist(), compute_result))
        return {"batches": len(calls)}

    request = {"compute_metrics": metric, "batch_metrics": True}
    out = evaluate(model, 5, 2, Gang(), **request)
    assert calls == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert out.metrics["eval_batches"] == 3
    assert out.predictions is None
    assert evaluate(model, 5, 2, Gang(), **request, predicting=True).predictions[1].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


class TestBadInput:
    def test_no_batch(self, model: TinyTagger, capsys: pytest.CaptureFixture[str]) -> None:
        assert evaluate(model, 0, 1, Gang()) == (None, None, {}, 0)
        assert "the evaluation data is empty" in capsys.readouterr().err

    def test_metrics_without_predictions(self) -> None:
        with pytest.raises(ConfigError, match="prediction_loss_only=True"):
            evaluation_of(None, loss_only=True, compute_metrics=lambda _: {})

    def test_batch_metrics_without_the_flag(self) -> None:
        with pytest.raises(ConfigError, match="compute_result"):
            evaluation_of(None, batch_metrics=True, compute_metrics=lambda prediction: {})

    def run(self, step: Any, **request: Any) -> Any:
        batches = [([i], {"x": torch.ones(1, i + 1)}) for i in range(2)]
        return evaluation_loop(batches, evaluation_of(step, **request))

    def test_model_with_nothing_but_a_loss(self) -> None:
        with pytest.raises(ModelError, match="nothing beside the loss"):
            self.run(lambda b: (torch.tensor(1.0), None, b["x"]), compute_metrics=lambda _: {})

    def test_no_labels(self) -> None:
        with pytest.raises(DataError, match="label_names"):
            self.run(lambda b: (None, b["x"], None), compute_metrics=lambda _: {})

    def test_no_labels_is_fine_when_predicting(self) -> None:
        out = self.run(lambda b: (None, b["x"], None), compute_metrics=lambda _: {"a": 1}, predicting=True)
        assert out.metrics == {}
        assert out.predictions.tolist() == [[1, -100], [1, 1]]

    def test_metric_that_returns_no_dict(self) -> None:
        with pytest.raises(ConfigError, match="compute_metrics='float'"):
            self.run(lambda b: (None, b["x"], b["x"]), compute_metrics=lambda _: 0.5)

    def test_batches_of_different_structure(self) -> None:
        def step(batch: Any) -> Any:
            return None, batch["x"] if batch["x"].shape[1] == 1 else (batch["x"],), None

        with pytest.raises(
            ModelError, match=r"batch 1 are built as \(tensor\), those of the first batch as tensor"
        ):
            self.run(step)

    def test_outputs_that_are_no_tensors(self) -> None:
        with pytest.raises(ModelError, match=r"found str at \['text'\]"):
            self.run(lambda b: (None, {"text": "hello"}, None))

    def test_batches_of_different_rank(self) -> None:
        with pytest.raises(ModelError, match="number of axes"):
            self.run(lambda b: (None, b["x"] if b["x"].shape[1] == 1 else b["x"][None], None))

    def test_inputs_that_are_not_there(self) -> None:
        with pytest.raises(DataError, match=r"'input_ids' in every batch; this one holds \['x'\]"):
            self.run(lambda b: (None, b["x"], b["x"]), include=("inputs",))


def live_tensor_bytes() -> int:
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if type(thing) is Tensor and thing.layout is torch.strided)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("batch_metrics", [False, True])
def test_memory_is_flat_unless_predictions_are_asked_for(batch_metrics: bool) -> None:
    def alive_at_the_end(batches: int) -> int:
        alive = []

        def on_batch() -> None:
            calls.pop()
            if not calls:
                alive.append(live_tensor_bytes())

        calls = [None] * batches

        def stream() -> Iterator[tuple[list[int], Any]]:
            for i in range(batches):
                yield [i], {"x": torch.ones(1, 10_000)}

        def step(batch: Any) -> Any:
            return batch["x"].mean(), batch["x"] * 2, batch["x"]

        metric = {"compute_metrics": lambda prediction, compute_result: {}, "batch_metrics": True}
        options = metric if batch_metrics else {"loss_only": True}
        evaluation_loop(stream(), evaluation_of(step, **options), on_batch=on_batch)
        return alive[0]

    assert alive_at_the_end(40) <= alive_at_the_end(4) + 1000


def test_batches_are_let_go_while_they_are_joined() -> None:
    held: list[int] = []

    class Watching(Gang):
        def stream(self, tensors: list[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
            for streamed in super().stream(tensors):
                held.append(streamed[2].nbytes + sum(tensor.nbytes for tensor in tensors))
                yield streamed

    batches = [([i], {"x": torch.ones(1, 1000)}) for i in range(10)]
    evaluation_loop(batches, evaluation_of(lambda b: (None, b["x"], None)), data_ranks=Watching())
    assert held == [80, *(4000 * left for left in range(10, 0, -1))], (
        "positions first, then ever fewer batches"
    )


def test_much_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("windlass.engine.evaluate.HEAVY_BYTES", 1000)
    evaluate(TinyTagger(), 20, 2, Gang())
    assert capsys.readouterr().err.count("preprocess_logits_for_metrics") == 1


class CopyCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that are written by copies and joins."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in {"cat", "copy_", "clone", "index_put_", "_to_copy"} and isinstance(
            out, Tensor
        ):
            written = args[1] if func.overloadpacket.__name__ == "copy_" else out
            if func.overloadpacket.__name__ == "index_put_":
                written = args[2]
            self.elements += written.numel()
        return out


def test_copies_are_linear_in_the_number_of_samples() -> None:
    def copied(count: int) -> int:
        batches = [([i], {"x": torch.ones(1, 1000)}) for i in range(count)]
        with CopyCounter() as counter:
            evaluation_loop(batches, evaluation_of(lambda b: (None, b["x"], None)))
        return counter.elements

    assert copied(200) <= 10.5 * copied(20)
    assert copied(200) <= 200 * 1000 * 2.1, "kept once, placed once"


def test_uneven_shards_cover_the_data() -> None:
    for world in (1, 2, 3):
        ids = [i for rank in range(world) for run in shards(97, 5, rank, world) for i in run]
        assert sorted(ids) == list(range(97))


@pytest.mark.parametrize("in_step", [False, True])
def test_a_rank_that_fails_tells_others_only_where_they_listen(in_step: bool) -> None:
    told: list[Any] = []

    class Told(Gang):
        def gather_objects(self, value: Any) -> list[Any]:
            told.append(value)
            return [value]

    def fails(batch: Any) -> Any:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        evaluation_loop([([0], {})], evaluation_of(fails, in_step=in_step), data_ranks=Told())
    assert len(told) == (0 if in_step else 1), "others that wait in a forward hear nothing else"
