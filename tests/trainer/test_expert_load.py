"""What is counted of the experts of a mixture. Several ranks and resumed runs are in `test_expert_runs.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainer.context_cases import collate, model, samples
from torch import Tensor, nn

from windlass.trainer.expert_load import ExpertLoad

pytest.importorskip("transformers")


def load_of(module: nn.Module, counts: bool = True, filling: bool = False) -> ExpertLoad:
    return ExpertLoad(module, torch.device("cpu"), lambda value: value, counts, lambda: filling)


def chosen_by(mixture: Any, batch: dict[str, Tensor]) -> Tensor:
    """Tokens of each expert, by the logits of its router; shape (layers, experts)."""
    with torch.no_grad():
        logits = mixture(**batch, output_router_logits=True).router_logits
    kept = batch["attention_mask"].flatten().bool()
    return torch.stack([
        torch.bincount(layer[kept].topk(2).indices.flatten(), minlength=4) for layer in logits
    ]).double()  # fmt: skip


def test_tokens_of_each_expert_are_counted_without_padding() -> None:
    mixture, first, second = model("balanced"), collate(samples(3)), collate(samples(5)[3:])
    tokens = chosen_by(mixture, first) + chosen_by(mixture, second)
    load = load_of(mixture)
    with load.counting():
        losses = [mixture(**batch).aux_loss for batch in (first, second)]
        load.end_update()
    found = load.read()
    ratios = tokens.amax(1) / tokens.mean(1)
    assert found["expert_load"] == pytest.approx(float(ratios.mean()), rel=1e-12)
    assert found["expert_load_max"] == float(ratios.max())
    assert found["aux_loss"] == pytest.approx(float(sum(losses) / 2))
    assert load.read() == {}, "since the last report"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8])
def test_a_mask_may_have_any_type(dtype: torch.dtype) -> None:
    mixture, batch = model("mixtral"), collate(samples(3))
    tokens = int(chosen_by(mixture, batch).sum())
    load = load_of(mixture)
    with load.counting():
        mixture(**{**batch, "attention_mask": batch["attention_mask"].to(dtype)})
        load.end_update()
    assert int(load.state_dict()["tokens"].sum()) == tokens


def test_experts_without_a_token_are_reported() -> None:
    mixture, batch = model("mixtral"), collate(samples(3))
    with torch.no_grad():
        for layer in mixture.model.layers:
            layer.mlp.gate.weight.zero_()  # the first two experts of equal ones are chosen
    load = load_of(mixture)
    with load.counting():
        mixture(**batch)
        load.end_update()
    assert load.read() == {"expert_load": 2.0, "expert_load_max": 2.0, "experts_unused": 0.5}


def test_recomputed_layers_evaluations_and_failed_attempts_do_not_count() -> None:
    mixture, batch = model("mixtral"), collate(samples(3))
    mixture.gradient_checkpointing_enable({"use_reentrant": False})
    load = load_of(mixture)
    with load.counting():
        mixture(**batch).loss.backward()
        load.start_over()
        with torch.no_grad():
            mixture(**batch)
        mixture.eval()(**batch)
        mixture.train()(**batch, use_cache=False).loss.backward()
        load.end_update()
    mixture(**batch)
    load.end_update()
    assert int(load.state_dict()["tokens"].sum()) == 2 * 2 * int(batch["attention_mask"].sum())


@pytest.mark.parametrize("options", [{"counts": False}, {"filling": True}])
def test_what_other_ranks_count_is_left_to_them(options: Any) -> None:
    mixture, batch = model("balanced"), collate(samples(3))
    load = load_of(mixture, **options)
    with load.counting():
        mixture(**batch)
        load.end_update()
    assert load.read() == {}


def test_a_resumed_run_continues_the_sums_and_one_on_other_ranks_adds_them_up() -> None:
    mixture, batch = model("mixtral"), collate(samples(3))
    load = load_of(mixture)
    with load.counting():
        mixture(**batch)
        load.end_update()
    saved = load.state_dict()
    tokens = saved["tokens"].clone()
    again = load_of(mixture)
    again.adopt([saved, saved])
    assert torch.equal(again.state_dict()["tokens"], 2 * tokens)
    load.read()
    assert torch.equal(saved["tokens"], tokens)
    other = load_of(model("llama"))
    other.load_state_dict(saved)
    assert other.read() == {}
