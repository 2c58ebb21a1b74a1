"""Ranks that divide the sequences of a batch train, report and evaluate as one process does."""

from __future__ import annotations

import json
import shutil
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


Run = Callable[..., Results]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(world: int, cases: dict[str, Case], folder: Path | None = None) -> Results:
        folder = folder or tmp_path_factory.mktemp("context")
        folder.mkdir(exist_ok=True)
        launch(world, CASES, folder, json.dumps(cases))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]

    return run


def check_equal(
    run: Run,
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
def test_two_ranks_equal_one_process(run: Run) -> None:
    cases: dict[str, Case] = {
        "ring": ("llama", RING, {}),
        "heads": ("gpt2", ULYSSES, {}),
        "sharded": ("llama", RING, {"fsdp": True, "gradient_checkpointing": True}),
        "own loss": ("llama", ULYSSES, {"own_loss": True}),
    }
    check_equal(run, 2, cases, {"own loss": SINGLE})


@pytest.mark.slow
@pytest.mark.dist
def test_models_with_windows_and_norms_of_heads(run: Run) -> None:
    cases: dict[str, Case] = {
        f"{model} {method}": (model, parallel, {})
        for model in ("qwen3", "gemma3", "gpt2", "llama")
        for method, parallel in (("ring", RING), ("heads", ULYSSES))
    }
    check_equal(run, 2, cases, {name: SINGLE for name in cases if name.startswith("gemma3")})


@pytest.mark.slow
@pytest.mark.dist
def test_replicas_and_shards_of_divided_sequences(run: Run) -> None:
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


def rewind(folder: Path) -> None:
    """Leave each run of a folder as it was when it had saved its third update."""
    for newest in folder.glob("*/checkpoint-6"):
        shutil.rmtree(newest)


@pytest.mark.dist
def test_a_checkpoint_is_continued_on_any_layout(run: Run, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    shards = {**saving, "fsdp": True}
    cases: dict[str, Case] = {"replicated": ("gpt2", RING, saving), "sharded": ("llama", RING, shards)}
    whole = run(2, cases, tmp_path / "two")[0]
    for folder in ("alone", "other"):
        shutil.copytree(tmp_path / "two", tmp_path / folder)
    for folder in tmp_path.iterdir():
        rewind(folder)
    again = run(2, resumed(cases), tmp_path / "two")[0]
    alone = {name: (model, {}, saving) for name, (model, _, _) in cases.items()}
    [one] = run(1, resumed(alone), tmp_path / "alone")
    other = run(
        2,
        resumed({name: (model, ULYSSES, each) for name, (model, _, each) in cases.items()}),
        tmp_path / "other",
    )
    for name in cases:
        assert again[name]["weights"] == whole[name]["weights"], "to the bit"
        for found in (one, other[0]):
            difference = np.abs(np.array(found[name]["weights"]) - np.array(whole[name]["weights"])).max()
            assert difference <= DOUBLE, (name, difference)
            # The reports after the third update, the evaluation and the mean loss of the run.
            count = min(len(found[name]["reported"]), len(again[name]["reported"]))
            ends = [np.array(each[name]["reported"][-count:-1]) for each in (found, whole)]
            assert np.abs(ends[0] - ends[1]).max() <= DOUBLE, name


def resumed(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: (model, parallel, {**changes, "resume": True})
        for name, (model, parallel, changes) in cases.items()
    }
