"""Ranks that divide the sequences of a batch train, report and evaluate as one process does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
CASES = Path(__file__).with_name("context_cases.py")
Case = tuple[str, dict[str, Any], dict[str, Any]]
Results = list[dict[str, dict[str, list[float]]]]
RING, ULYSSES, TENSOR = {"cp_size": 2}, {"sp_size": 2}, {"tp_size": 2}
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
        for model in ("qwen3", "gemma3", "gpt2", "llama", "mixtral")
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
    alone: dict[str, Case] = {
        "four to a row": ("llama", {"cp_size": 4}, {}),
        "rings of heads": ("qwen3", {"cp_size": 2, "sp_size": 2}, {}),
        "sharded rings of heads": ("gpt2", {"cp_size": 2, "sp_size": 2}, {"fsdp": True}),
    }
    check_equal(run, 4, alone, {})


def rewind(folder: Path) -> None:
    """Leave each run of a folder as it was when it had saved its third update."""
    for newest in folder.glob("*/checkpoint-6"):
        shutil.rmtree(newest)


@pytest.mark.slow
@pytest.mark.dist
def test_a_checkpoint_is_continued_on_any_layout(run: Run, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    cases: dict[str, Case] = {
        "replicated": ("gpt2", RING, saving),
        "sharded": ("llama", RING, {**saving, "fsdp": True}),
    }
    check_continued(
        run, tmp_path, cases, {name: (model, ULYSSES, each) for name, (model, _, each) in cases.items()}
    )


def check_continued(
    run: Run, folder: Path, cases: dict[str, Case], others: dict[str, Case], ranks: int = 2, first: int = 2
) -> None:
    """Runs of `first` ranks are continued from their third update: on the same layout to the bit; on one process, and
    as `others` on `ranks` ranks, to the same results.
    """
    whole = run(first, cases, folder / "same")[0]
    for copy in ("alone", "other"):
        shutil.copytree(folder / "same", folder / copy)
    for newest in folder.glob("*/*/checkpoint-6"):
        shutil.rmtree(newest)
    again = run(first, resumed(cases), folder / "same")[0]
    layout = {"fsdp"}
    alone: dict[str, Case] = {
        name: (model, {}, {key: value for key, value in each.items() if key not in layout})
        for name, (model, _, each) in cases.items()
    }
    [one] = run(1, resumed(alone), folder / "alone")
    other = run(ranks, resumed(others), folder / "other")[0]
    for name in cases:
        assert again[name]["weights"] == whole[name]["weights"], "to the bit"
        # All reports of the second half but the last, the mean loss of the call.
        count = len(again[name]["reported"])
        for found in (one[name], other[name]):
            for ours, theirs in (
                (found["weights"], whole[name]["weights"]),
                (found["reported"][-count:-1], whole[name]["reported"][-count:-1]),
            ):
                assert np.abs(np.array(ours) - np.array(theirs)).max() <= DOUBLE, name


def check_killed(
    run: Run, script: Path, folder: Path, case: Case, ranks: int, steps: Sequence[int], updates: int = 6
) -> str:
    """A run whose last rank is killed at the end of some updates, and before the update of others, and continued each
    time, ends with the bits of one that was not. Return what the other ranks said last.
    """
    model, layout, changes = case
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": updates, "resume": "auto", **changes}
    whole = run(ranks, {"x": (model, layout, saving)}, folder / "whole")
    killed, said = folder / "killed", ""
    killed.mkdir()
    for number, step in enumerate(steps):
        event = ("on_step_end", "on_pre_optimizer_step")[number % 2]
        struck: Case = (model, layout, {**saving, "killed_at": step, "killed_on": event})
        said = launch(ranks, script, killed, json.dumps({"x": struck}), expect=1)
        assert "eval_loss" not in said
    found = run(ranks, {"x": (model, layout, saving)}, killed)
    assert [one["x"]["weights"] for one in found] == [one["x"]["weights"] for one in whole]
    return said


def resumed(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: (model, parallel, {**changes, "resume": True})
        for name, (model, parallel, changes) in cases.items()
    }


@pytest.mark.dist
def test_layers_divided_among_two_ranks_equal_one_process(run: Run) -> None:
    cases: dict[str, Case] = {
        "a head in parts": ("even", TENSOR, {}),
        "tied, norms of heads": ("qwen3", TENSOR, {}),
        "experts": ("qwen3_moe", TENSOR, {}),
        "a plan of the family, weights with inputs in rows": ("gpt2", TENSOR, {}),
        "encoder and decoder": ("t5", TENSOR, {"own_loss": True}),
    }
    check_equal(run, 2, cases, {})


@pytest.mark.slow
@pytest.mark.dist
def test_layers_of_other_families_equal_one_process(run: Run) -> None:
    names = ("mixtral", "balanced", "olmoe", "deepseek_v3", "gpt_oss", "phi3")
    check_equal(run, 2, {name: (name, TENSOR, {}) for name in names}, {})
    one = {"per_device_train_batch_size": 1}
    shards = {"tp_size": 2, "dp_shard_size": 2}
    cases: dict[str, Case] = {name: (name, shards, one) for name in ("mixtral", "gpt2")}
    cases["t5"] = ("t5", shards, {**one, "own_loss": True})
    check_equal(run, 4, cases, {}, {"per_device_train_batch_size": 2})


@pytest.mark.dist
def test_shards_of_divided_layers_equal_one_process(run: Run) -> None:
    # A vocabulary of 23: parts of 12 and 11, of which shards are uneven again.
    cases: dict[str, Case] = {
        "sharded": ("llama", TENSOR, {"fsdp": True, "per_device_train_batch_size": 1}),
    }
    check_equal(run, 4, cases, {}, {"per_device_train_batch_size": 2})


@pytest.mark.slow
@pytest.mark.dist
def test_shards_of_divided_layers_of_other_models_and_with_other_axes(run: Run) -> None:
    wrapped = {"fsdp": "full_shard auto_wrap", "per_device_train_batch_size": 1}
    cases: dict[str, Case] = {
        "a size": ("even", {"tp_size": 2, "dp_shard_size": 2}, {"per_device_train_batch_size": 1}),
        "tied": ("tied", TENSOR, {**wrapped, "gradient_checkpointing": True}),
        "norms of heads": ("qwen3", TENSOR, wrapped),
        "scaled embedding": ("gemma3", TENSOR, wrapped),
    }
    check_equal(run, 4, cases, {"scaled embedding": 1e-5}, {"per_device_train_batch_size": 2})
    rows: dict[str, Case] = {"rows": ("tied", {"tp_size": 2, "cp_size": 2}, {"fsdp": True})}
    check_equal(run, 4, rows, {})
    three = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}
    replicas: dict[str, Case] = {"replicas": ("qwen3", three, {"per_device_train_batch_size": 1})}
    check_equal(run, 8, replicas, {}, {"per_device_train_batch_size": 4})


@pytest.mark.slow
@pytest.mark.dist
def test_shards_of_divided_layers_are_continued_on_any_layout_and_back(run: Run, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "fsdp": True}
    whole = {key: value for key, value in saving.items() if key != "fsdp"}
    case: Case = ("heads", {"tp_size": 2, "dp_shard_size": 2}, {**saving, "per_device_train_batch_size": 2})
    expected = run(4, {"x": case}, tmp_path / "same")[0]["x"]["weights"]
    layouts: dict[str, tuple[int, Case]] = {
        "one process": (1, ("heads", {}, {**whole, "per_device_train_batch_size": 4})),
        "tensor": (4, ("heads", {"tp_size": 4}, {**whole, "per_device_train_batch_size": 4})),
        "shards": (4, ("heads", {"dp_shard_size": 4}, {**saving, "per_device_train_batch_size": 1})),
    }
    for name in layouts:
        shutil.copytree(tmp_path / "same", tmp_path / name)
    for newest in tmp_path.glob("*/*/checkpoint-6"):
        shutil.rmtree(newest)
    assert run(4, resumed({"x": case}), tmp_path / "same")[0]["x"]["weights"] == expected, "to the bit"
    longer: Case = (case[0], case[1], {**case[2], "max_steps": 8})
    onward = run(4, resumed({"x": longer}), tmp_path / "same")[0]["x"]["weights"]
    for name, (ranks, other) in layouts.items():
        found = run(ranks, resumed({"x": other}), tmp_path / name)[0]["x"]["weights"]
        assert np.abs(np.array(found) - np.array(expected)).max() <= DOUBLE, name
        back = run(4, resumed({"x": longer}), tmp_path / name)[0]["x"]["weights"]
        assert np.abs(np.array(back) - np.array(onward)).max() <= DOUBLE, f"{name}, and back"


@pytest.mark.slow
@pytest.mark.dist
def test_a_killed_run_of_shards_of_divided_layers_ends_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    check_killed(
        run, CASES, tmp_path, ("tied", {"tp_size": 2, "dp_shard_size": 2}, {"fsdp": True}), 4, (3, 5)
    )


@pytest.mark.slow
@pytest.mark.dist
def test_divided_layers_with_other_axes(run: Run) -> None:
    cases: dict[str, Case] = {name: (name, TENSOR, {}) for name in ("llama", "tied", "gemma3")}
    check_equal(
        run,
        2,
        cases | {"own loss": ("even", TENSOR, {"own_loss": True})},
        {"gemma3": SINGLE, "own loss": SINGLE},
    )
    both: dict[str, Case] = {name: (name, {"tp_size": 2, "cp_size": 2}, {}) for name in ("even", "qwen3")}
    check_equal(run, 4, both | {"heads": ("even", {"tp_size": 2, "sp_size": 2}, {})}, {})
    replicas: dict[str, Case] = {"replicas": ("even", TENSOR, {"per_device_train_batch_size": 1})}
    check_equal(run, 4, replicas, {}, {"per_device_train_batch_size": 2})


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "ranks"), [(RING, 2), pytest.param({"tp_size": 2, "cp_size": 2}, 4, marks=pytest.mark.slow)]
)
def test_divided_layers_are_continued_on_any_layout(
    run: Run, tmp_path: Path, layout: dict[str, int], ranks: int
) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    check_continued(
        run, tmp_path, {"even": ("even", TENSOR, changes)}, {"even": ("even", layout, changes)}, ranks
    )
