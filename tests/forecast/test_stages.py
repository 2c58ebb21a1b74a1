"""Traces of pipelines, of divided experts and positions, against what theory says of their memory and traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.forecast.models import BATCH, HIDDEN, LENGTH, llama, mixture, trainer

from windlass import ParallelismConfig
from windlass.forecast.forecast import Forecast
from windlass.forecast.trace import Trace
from windlass.forecast.tracing import trace_of, trace_of_largest
from windlass.utils import PipelineParallelConfig, TorchTensorParallelConfig


def at_most(found: Trace, kind: str) -> int:
    return found.at_most(lambda owner: owner.kind == kind)


def pipeline(
    folder: Path, micro_batches: int, rank: int = 0, schedule: str = "1F1B", **options: Any
) -> Trace:
    layout = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(pp_schedule=schedule))
    given = {"parallelism_config": layout, "gradient_accumulation_steps": micro_batches, **options}
    return trace_of(lambda: trainer(folder, **given).train(), 2, rank)


def test_a_stage_has_its_layers_and_sends_its_border(tmp_path: Path) -> None:
    whole = sum(p.numel() for p in llama().parameters()) * 4
    first, last = (pipeline(tmp_path, 2, rank) for rank in (0, 1))
    halves = [at_most(found, "gradients") for found in (first, last)]
    assert sum(halves) == whole, "every parameter is on one rank"
    assert halves[1] - halves[0] == HIDDEN * 4, "the last norm; head and embedding are equally large"
    border = BATCH * LENGTH * HIDDEN * 4
    for found in (first, last):
        [link] = Forecast(found).links()
        assert link.axis == "pipeline"
        assert 2 * border <= link.nbytes < 2 * border + 1000, "beside activations there are headers"


@pytest.mark.slow
def test_a_schedule_decides_how_many_micro_batches_are_kept(tmp_path: Path) -> None:
    """The first of two stages keeps two micro-batches under 1F1B, however many there are, and all under GPipe."""
    kept = {
        (schedule, count): at_most(pipeline(tmp_path, count, schedule=schedule), "activations")
        for schedule, count in (("1F1B", 2), ("1F1B", 4), ("GPipe", 4))
    }
    assert kept["1F1B", 4] == kept["1F1B", 2]
    assert kept["GPipe", 4] == pytest.approx(2 * kept["1F1B", 4], rel=0.05)


@pytest.mark.slow
def test_the_largest_rank_is_shown_and_the_checkpoint_is_that_of_all(tmp_path: Path) -> None:
    layout = ParallelismConfig(pp_size=2)
    given = {"parallelism_config": layout, "gradient_accumulation_steps": 2}
    found = trace_of_largest(lambda: trainer(tmp_path, **given).train(), 2)
    peaks = dict(map(tuple, found.facts["peaks"]))
    assert list(peaks) == [0, 1]
    assert found.peak[1].total == max(peaks.values())
    weights = sum(p.numel() for p in llama().parameters()) * 4
    steps = 4 * len(list(llama().parameters()))
    assert found.saved["weights"] == weights
    assert found.saved["optimizer state"] == 2 * weights + steps


def test_the_last_stage_makes_no_whole_logits_and_its_layers_can_be_divided(tmp_path: Path) -> None:
    """As in a run the loss is made without logits; with `tp_size` a stage has half of its matrices, with shards half of
    its state.
    """
    plain = pipeline(tmp_path, 2, 1)
    alone = trace_of(lambda: trainer(tmp_path).train())
    assert at_most(plain, "logits") == at_most(alone, "logits") > 0
    kept = {
        name: trace_of(
            lambda given=given: trainer(  # type: ignore[misc]
                tmp_path,
                parallelism_config=ParallelismConfig(pp_size=2, **given),
                gradient_accumulation_steps=2,
            ).train(),
            4,
            2,
        )
        for name, given in (("tensor", {"tp_size": 2}), ("shard", {"dp_shard_size": 2}))
    }
    layer = llama().model.layers[1]
    norms = 4 * (sum(p.numel() for p in layer.parameters() if p.ndim == 1) + HIDDEN)
    assert at_most(kept["tensor"], "gradients") - norms == (at_most(plain, "gradients") - norms) / 2
    assert at_most(kept["tensor"], "logits") == at_most(plain, "logits") / 2
    assert at_most(kept["shard"], "logits") == at_most(plain, "logits")
    steps = 4 * len([*layer.parameters(), "norm", "head"])
    assert (
        at_most(kept["shard"], "optimizer state") - steps == (at_most(plain, "optimizer state") - steps) / 2
    )
    sent = {
        name: {link.axis: link.nbytes for link in Forecast(found).links()} for name, found in kept.items()
    }
    border = BATCH * LENGTH * HIDDEN * 4
    assert all(2 * border <= links["pipeline"] < 2 * border + 1000 for links in sent.values())
    assert sent["shard"]["shard"] < 1.1 * at_most(plain, "weights"), "gathered and reduced once an update"
    assert sent["tensor"]["tensor"] > 2 * 4 * border, "two micro-batches, four sums of activations"


def test_divided_positions_halve_what_norms_keep_and_are_gathered_again(tmp_path: Path) -> None:
    """`tests/transforms/positions_ranks.py` counts the same bytes on real ranks."""

    def traced(positions: bool) -> Trace:
        handler = TorchTensorParallelConfig(enable_sequence_parallel=positions)
        layout = ParallelismConfig(tp_size=2, tp_handler=handler)
        return trace_of(
            lambda: trainer(tmp_path, layers=2, parallelism_config=layout, lean_loss=False).train(), 2
        )

    whole, parts = traced(False), traced(True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        kept = [
            found.at_most(lambda owner: owner.kind == "activations" and owner.place.endswith(name))  # noqa: B023
            for found in (whole, parts)
        ]
        assert kept[0] == 2 * kept[1] > 0, name
    states = BATCH * LENGTH * HIDDEN * 4
    # What norms keep of a layer are the sums before them, what they scale, and what divided layers begin with.
    assert at_most(whole, "activations") - at_most(parts, "activations") > 6 * 2 * states / 2
    sent = [{link.axis: link.nbytes for link in Forecast(found).links()} for found in (whole, parts)]
    # Two inputs of each of two layers, gathered again, and both ends of the stack: half of the states each.
    assert sent[1]["tensor"] - sent[0]["tensor"] == (1 + 2) * states


def test_experts_are_divided_and_tokens_travel(tmp_path: Path) -> None:
    named = dict(mixture().named_parameters())
    of_experts = sum(p.numel() for name, p in named.items() if ".experts." in name) * 4
    rest = sum(p.numel() for p in named.values()) * 4 - of_experts
    layout = {"parallelism_config": ParallelismConfig(ep_size=2), "lean_loss": False}
    found = trace_of(lambda: trainer(tmp_path, mixture(), **layout).train(), 4)
    assert at_most(found, "weights") == at_most(found, "gradients") == rest + of_experts // 2
    assert found.saved["weights"] == rest + of_experts
    sent = {link.axis: link.nbytes for link in Forecast(found).links()}
    # Two layers; there and back, and the same in the backward; each token goes to two experts, half of them elsewhere.
    travels = 2 * 4 * (2 * BATCH * LENGTH * HIDDEN * 4) // 2
    assert travels <= sent["expert"] < travels + 1000
    # A gradient is summed over the two ranks that have the same experts, of all else over four.
    assert sent["replicate"] == 2 * (of_experts // 2) // 2
    assert 2 * rest * 3 // 4 <= sent["replicate x expert"] < 2 * rest * 3 // 4 + 1000


def test_experts_are_divided_among_the_tensor_gang_of_each_rank_too(tmp_path: Path) -> None:
    named = dict(mixture().named_parameters())
    of_experts = sum(p.numel() for name, p in named.items() if ".experts." in name) * 4

    def traced(ranks: int, **axes: int) -> Trace:
        given = {"parallelism_config": ParallelismConfig(**axes), "lean_loss": False}
        return trace_of(lambda: trainer(tmp_path, mixture(), **given).train(), ranks)

    alone, found = traced(2, tp_size=2), traced(4, ep_size=2, tp_size=2)
    assert at_most(alone, "weights") - at_most(found, "weights") == of_experts // 4
    assert found.saved["weights"] == sum(p.numel() for p in named.values()) * 4
    sent = sum(one.nbytes * times for one, times in found.sent.items() if one.name == "all-to-all")
    # Half of what one rank would send: each rank of a tensor gang has half of the experts.
    travels = 2 * 4 * (2 * BATCH * LENGTH * HIDDEN * 4) // 4
    assert travels <= sent < travels + 1000


@pytest.mark.slow
def test_stages_of_experts_and_of_divided_rows(tmp_path: Path) -> None:
    def traced(ranks: int, **axes: int) -> Trace:
        given = {"parallelism_config": ParallelismConfig(pp_size=2, **axes), "gradient_accumulation_steps": 2}
        return trace_of(lambda: trainer(tmp_path, mixture(), **given).train(), ranks)

    of_experts = sum(p.numel() for name, p in mixture().named_parameters() if ".experts." in name) * 4
    plain, experts, rows = traced(2), traced(4, ep_size=2), traced(4, cp_size=2)
    assert at_most(plain, "gradients") - at_most(experts, "gradients") == of_experts // 4, "half of a stage's"
    border = BATCH * LENGTH * HIDDEN * 4
    sent = [{link.axis: link.nbytes for link in Forecast(found).links()} for found in (experts, rows)]
    assert 2 * border <= sent[0]["pipeline"] < 2 * border + 1000
    assert border <= sent[1]["pipeline"] < border + 1000, "half of each row"
    assert at_most(rows, "activations") < 0.6 * at_most(plain, "activations")


@pytest.mark.slow
def test_products_of_experts_are_counted(tmp_path: Path) -> None:
    """Twice as many experts for each token: their products are twice as many, in any dtype."""

    def flops(chosen: int) -> int:
        def made() -> Any:
            model = mixture()
            model.config.num_experts_per_tok = chosen
            for layer in model.model.layers:
                layer.mlp.gate.top_k = chosen
            return model

        found = trace_of(lambda: trainer(tmp_path, made()).train())
        return sum(work.flops * times for work, times in found.work.items())

    each = 3 * 3 * 2 * 2 * BATCH * LENGTH * HIDDEN * HIDDEN  # matrices, directions, layers; a sum of products
    assert flops(2) - flops(1) == each
