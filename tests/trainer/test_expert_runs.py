"""Ranks that divide the experts of a mixture train, report and evaluate as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.context_cases import main
from tests.trainer.layout_runs import (
    Case,
    Run,
    check_continued,
    check_equal,
    check_killed,
    runner,
)

pytest.importorskip("transformers")
EXPERTS, LAYERS, SEQUENCES = {"ep_size": 2}, {"ep_size": 2, "tp_size": 2}, {"ep_size": 2, "cp_size": 2}
ONE, TWO, FOUR = ({"per_device_train_batch_size": rows} for rows in (1, 2, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(main, lambda: tmp_path_factory.mktemp("experts"))


@pytest.mark.dist
def test_two_ranks_with_half_of_the_experts_equal_one_process(run: Run) -> None:
    cases: dict[str, Case] = {
        "replicated": ("mixtral", EXPERTS, ONE),
        "sharded": ("mixtral", EXPERTS, {**ONE, "fsdp": True, "gradient_checkpointing": True}),
        "balanced": ("balanced", EXPERTS, {**ONE, "own_loss": True}),
        "experts alone": ("mixtral", EXPERTS, {**ONE, "trains": "experts"}),
        "experts alone, sharded": ("mixtral", EXPERTS, {**ONE, "trains": "experts", "fsdp": True}),
    }
    check_equal(run, 2, cases, TWO)


@pytest.mark.slow
@pytest.mark.dist
def test_families_of_mixtures(run: Run) -> None:
    cases: dict[str, Case] = {
        f"{model} {layout}": (model, EXPERTS, {**ONE, **changes})
        for model in ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
        for layout, changes in (("replicated", {}), ("sharded", {"fsdp": True}))
    }
    cases["balanced shards"] = ("balanced", EXPERTS, {**ONE, "own_loss": True, "fsdp": True})
    check_equal(run, 2, cases, TWO)


@pytest.mark.slow
@pytest.mark.dist
def test_experts_with_replicas_and_shards(run: Run) -> None:
    cases: dict[str, Case] = {
        "replicas": ("mixtral", EXPERTS, ONE),
        "shards": ("qwen3_moe", EXPERTS, {**ONE, "fsdp": True}),
        "replicas of shards": ("mixtral", {**EXPERTS, "dp_shard_size": 2, "dp_replicate_size": 2}, ONE),
        "one expert each": ("gpt_oss", {"ep_size": 4}, ONE),
    }
    check_equal(run, 4, cases, FOUR)


@pytest.mark.dist
def test_experts_with_divided_layers_or_sequences(run: Run) -> None:
    cases: dict[str, Case] = {
        "layers": ("balanced", LAYERS, {**ONE, "own_loss": True}),
        "sequences": ("balanced", SEQUENCES, {**ONE, "own_loss": True}),
    }
    check_equal(run, 4, cases, TWO)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [LAYERS, SEQUENCES, {"ep_size": 2, "sp_size": 2}])
@pytest.mark.parametrize("changes", [{}, {"fsdp": True, "gradient_checkpointing": True}])
def test_families_of_experts_with_other_axes(
    run: Run, layout: dict[str, int], changes: dict[str, object]
) -> None:
    names = ["mixtral", "qwen3_moe", *(["gpt_oss", "olmoe"] if "tp_size" in layout else [])]
    check_equal(run, 4, {name: (name, layout, {**ONE, **changes}) for name in names}, TWO)


@pytest.mark.slow
@pytest.mark.dist
def test_experts_with_two_other_axes(run: Run) -> None:
    cases: dict[str, Case] = {
        "layers of sequences": ("mixtral", {**LAYERS, "cp_size": 2}, ONE),
        "replicas of layers": ("mixtral", LAYERS, ONE),
    }
    for name, case in cases.items():
        check_equal(run, 8, {name: case}, TWO if "cp_size" in case[1] else FOUR)


@pytest.mark.dist
def test_a_killed_run_of_divided_experts_ends_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    check_killed(run, main, tmp_path, ("balanced", EXPERTS, {**ONE, "own_loss": True}), 2, (2,), updates=4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("changes", [{}, {"fsdp": True}])
@pytest.mark.parametrize("layout", [EXPERTS, LAYERS, SEQUENCES])
def test_killed_runs_of_experts_end_with_the_same_bits(
    run: Run, tmp_path: Path, layout: dict[str, int], changes: dict[str, object]
) -> None:
    check_killed(run, main, tmp_path, ("mixtral", layout, {**ONE, **changes}), 4, (2, 3, 5))


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_divided_experts_are_continued_on_any_layout(run: Run, tmp_path: Path, ranks: int) -> None:
    # All together train on 12 samples in an update.
    def changes(batch: int) -> dict[str, object]:
        return {
            "save_strategy": "steps",
            "save_steps": 3,
            "max_steps": 6,
            "per_device_train_batch_size": batch,
        }

    other = changes(4 // ranks)
    check_continued(
        run,
        tmp_path,
        {
            "mixtral": ("mixtral", EXPERTS, changes(2)),
            "sharded": ("mixtral", EXPERTS, {**changes(2), "fsdp": True}),
        },
        {
            "mixtral": ("mixtral", {"ep_size": ranks}, {**other, "fsdp": True}),
            "sharded": ("mixtral", {"ep_size": ranks}, other),
        },
        ranks,
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [LAYERS, SEQUENCES])
def test_experts_with_other_axes_are_continued_on_any_layout(
    run: Run, tmp_path: Path, layout: dict[str, int]
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    check_continued(
        run,
        tmp_path,
        {"x": ("mixtral", layout, {**saving, **TWO})},
        {"x": ("mixtral", {"ep_size": 4}, {**saving, **ONE, "fsdp": True})},
        ranks=4,
        first=4,
    )
