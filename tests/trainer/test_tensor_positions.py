"""Ranks that divide the positions between divided layers train, report and evaluate as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer import context_cases, pipeline_cases
from tests.trainer.layout_runs import Case, Run, check_continued, check_equal, check_killed, runner

pytest.importorskip("transformers")
POSITIONS: dict[str, Any] = {"tp_size": 2, "tp_sequence_parallel": True}
ONE = {"per_device_train_batch_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(context_cases.main, lambda: tmp_path_factory.mktemp("positions"))


@pytest.fixture(scope="module")
def run_stages(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(pipeline_cases.main, lambda: tmp_path_factory.mktemp("stages"))


@pytest.mark.dist
def test_two_ranks_equal_one_process(run: Run) -> None:
    cases: dict[str, Case] = {
        "llama": ("llama", POSITIONS, {}),
        "more norms": ("gemma3", POSITIONS, {"gradient_checkpointing": True}),
    }
    check_equal(run, 2, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "names",
    [("gpt2", "phi3", "gemma3"), ("mixtral", "balanced", "olmoe", "qwen3_moe"), ("even", "tied", "qwen3")],
)
def test_other_families_equal_one_process(run: Run, names: tuple[str, ...]) -> None:
    check_equal(run, 2, {name: (name, POSITIONS, {}) for name in names})


@pytest.mark.slow
@pytest.mark.dist
def test_four_ranks_and_the_models_own_loss_equal_one_process(run: Run) -> None:
    check_equal(run, 2, {"own loss": ("even", POSITIONS, {"own_loss": True})})
    check_equal(run, 4, {"four": ("heads", {**POSITIONS, "tp_size": 4}, {})})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("recomputed", [False, True])
def test_positions_with_other_axes(run: Run, recomputed: bool) -> None:
    more = {"gradient_checkpointing": True} if recomputed else {}
    cases: dict[str, Case] = {
        "replicas": ("qwen3", POSITIONS, {**ONE, **more}),
        "shards": ("tied", POSITIONS, {**ONE, **more, "fsdp": "full_shard auto_wrap"}),
        "shards of a size": ("llama", {**POSITIONS, "dp_shard_size": 2}, {**ONE, **more}),
        "experts": ("mixtral", {**POSITIONS, "ep_size": 2}, {**ONE, **more}),
    }
    check_equal(run, 4, cases, {"per_device_train_batch_size": 2})
    rows: dict[str, Case] = {
        name: ("qwen3", {**POSITIONS, axis: 2}, {**changes, **more})
        for name, axis, changes in (
            ("ring", "cp_size", {}),
            ("heads", "sp_size", {}),
            ("of shards", "cp_size", {"fsdp": True}),
        )
    }
    check_equal(run, 4, rows)


@pytest.mark.slow
@pytest.mark.dist
def test_positions_of_stages_and_with_adapters(run_stages: Run) -> None:
    stages = {**POSITIONS, "pp_size": 2}
    cases: dict[str, Case] = {
        "stages": ("llama", stages, {}),
        "adapted stages": ("adapted llama", stages, {}),
        "recomputed": (
            "qwen3",
            {**stages, "pp_schedule": "Interleaved1F1B"},
            {"gradient_checkpointing": True},
        ),
        "both ends on one process": ("tied", {**stages, "pp_schedule": "ZBVZeroBubble"}, {}),
    }
    check_equal(run_stages, 4, cases)
    adapted: dict[str, Case] = {
        "adapter": ("adapted llama", POSITIONS, {}),
        "in shards": ("adapted tied", POSITIONS, {"fsdp": True}),
    }
    check_equal(run_stages, 2, adapted)


@pytest.mark.dist
@pytest.mark.parametrize("changes", [{}, pytest.param({"fsdp": True}, marks=pytest.mark.slow)])
def test_a_killed_run_with_dropout_ends_with_the_same_bits(
    run: Run, tmp_path: Path, changes: dict[str, Any]
) -> None:
    check_killed(run, context_cases.main, tmp_path, ("dropped gpt2", POSITIONS, changes), 2, (2,), updates=4)


@pytest.mark.slow
@pytest.mark.dist
def test_divided_positions_are_continued_on_any_layout(run: Run, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    check_continued(
        run, tmp_path, {"even": ("even", POSITIONS, changes)}, {"even": ("even", {"tp_size": 2}, changes)}
    )
