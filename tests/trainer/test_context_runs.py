"""Ranks that divide the sequences of a batch train, report and evaluate as one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
CASES = Path(__file__).with_name("context_cases.py")
Case = tuple[str, dict[str, Any], dict[str, Any]]
Results = list[dict[str, dict[str, list[float]]]]
RING, ULYSSES = {"cp_size": 2}, {"sp_size": 2}
# Their own loss, and the norms of Gemma 3, are computed in single precision.
SINGLE, DOUBLE = 2e-6, 1e-10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, dict[str, Case]], Results]:
    def run(world: int, cases: dict[str, Case]) -> Results:
        folder = tmp_path_factory.mktemp("context")
        launch(world, CASES, folder, json.dumps(cases))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]

    return run


def check_equal(
    run: Callable[[int, dict[str, Case]], Results],
    world: int,
    cases: dict[str, Case],
    limits: dict[str, float],
    alone: dict[str, Any] | None = None,
) -> None:
    """`cases` on `world` ranks give what one process gives; `alone` are its arguments beside those of the case."""
    layout = {"fsdp", "gradient_checkpointing"}
    single: dict[str, Case] = {
        name: (model, {}, {key: value for key, value in changes.items() if key not in layout} | (alone or {}))
        for name, (model, _, changes) in cases.items()
    }
    [expected] = run(1, single)
    for rank, found in enumerate(run(world, cases)):
        for name in cases:
            for what, values in expected[name].items():
                difference = np.abs(np.array(found[name][what]) - np.array(values)).max()
                assert difference <= limits.get(name, DOUBLE), (
                    f"{name}, rank {rank}, {what}: off by {difference}"
                )


@pytest.mark.dist
def test_two_ranks_equal_one_process(run: Callable[[int, dict[str, Case]], Results]) -> None:
    cases: dict[str, Case] = {
        "ring": ("llama", RING, {}),
        "heads": ("gpt2", ULYSSES, {}),
        "sharded": ("llama", RING, {"fsdp": True, "gradient_checkpointing": True}),
        "own loss": ("llama", ULYSSES, {"own_loss": True}),
    }
    check_equal(run, 2, cases, {"own loss": SINGLE})


@pytest.mark.slow
@pytest.mark.dist
def test_models_with_windows_and_norms_of_heads(run: Callable[[int, dict[str, Case]], Results]) -> None:
    cases: dict[str, Case] = {
        f"{model} {method}": (model, parallel, {})
        for model in ("qwen3", "gemma3", "gpt2", "llama")
        for method, parallel in (("ring", RING), ("heads", ULYSSES))
    }
    check_equal(run, 2, cases, {name: SINGLE for name in cases if name.startswith("gemma3")})


@pytest.mark.slow
@pytest.mark.dist
def test_replicas_and_shards_of_divided_sequences(run: Callable[[int, dict[str, Case]], Results]) -> None:
    one = {"per_device_train_batch_size": 1}
    replicas: dict[str, Case] = {
        "replicated ring": ("llama", RING, one),
        "replicated heads": ("qwen3", {"sp_size": 2, "dp_replicate_size": 2}, one),
    }
    shards: dict[str, Case] = {
        "sharded ring": ("llama", {"cp_size": 2, "dp_shard_size": 2}, one),
        "sharded heads": ("gpt2", {"sp_size": 2}, {**one, "fsdp": True}),
    }
    whole = {"per_device_train_batch_size": 2}
    check_equal(run, 4, replicas, {}, whole)
    check_equal(run, 4, shards, {}, whole)
    check_equal(run, 4, {"four to a row": ("llama", {"cp_size": 4}, {})}, {})
