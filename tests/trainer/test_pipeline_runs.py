"""Ranks that divide the layers of a model train, report, evaluate and save as one process does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.layout_runs import (
    DOUBLE,
    Case,
    Run,
    check_continued,
    check_equal,
    check_killed,
    resumed,
    rewind,
    runner,
)
from tests.trainer.pipeline_cases import main
from tests.versions import is_older

pytest.importorskip("transformers")
TWO: dict[str, Any] = {"pp_size": 2}
TENSOR: dict[str, Any] = {"pp_size": 2, "tp_size": 2}
SHARDS: dict[str, Any] = {"pp_size": 2, "dp_shard_size": 2}
ROWS: dict[str, Any] = {"pp_size": 2, "cp_size": 2}
EXPERTS: dict[str, Any] = {"pp_size": 2, "ep_size": 2}
# Before torch 2.11 the one with the V is refused.
V: dict[str, Any] = {
    "pp_size": 2,
    "pp_schedule": "InterleavedZeroBubble" if is_older("torch", "2.11") else "ZBVZeroBubble",
}
BALANCED = {"own_loss": True}  # the model's own loss has the balancing loss of its experts
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def of_schedule(name: str, size: int = 2) -> dict[str, Any]:
    return {"pp_size": size, "pp_schedule": name}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(main, lambda: tmp_path_factory.mktemp("pipeline"))


@pytest.mark.dist
def test_two_stages_equal_one_process(run: Run) -> None:
    """The order of forwards and backwards, ties of two stages, a loss of the script's, a model of the script's, a stage
    that is not trained.
    """
    named = {**of_schedule("GPipe"), "pp_split_points": ["second"]}
    cases: dict[str, Case] = {
        "one forward, one backward": ("llama", TWO, {}),
        "tied": ("tied", TWO, {}),
        "there and back": ("tied", V, {}),
        "ties both ways": ("crossed", of_schedule("Interleaved1F1B"), {"trainer": "sequence"}),
        "a loss of the script's": ("llama", TWO, {"trainer": "own"}),
        "an adapter": ("adapted tied", TWO, {}),
        "balanced experts": ("balanced", TWO, BALANCED),
        "a model of the script's": ("plain", named, {}),
        "a frozen beginning": ("frozen", named, {}),
    }
    check_equal(run, 2, cases)


@pytest.mark.dist
def test_running_averages_are_those_of_the_stage_that_computes_them(run: Run) -> None:
    """In evaluations during a run, and in the model that is left and saved."""
    named = {**of_schedule("GPipe"), "pp_split_points": ["second"]}
    changes = {"eval_strategy": "steps", "eval_steps": 2}
    check_equal(run, 2, {"x": ("averaging", named, changes)})


@pytest.mark.dist
def test_models_that_cannot_be_cut_are_refused_on_all_ranks(run: Run) -> None:
    named = {**of_schedule("1F1B"), "pp_split_points": ["second"]}
    cases: dict[str, Case] = {
        "computes something else when it is cut into stages; different: logits": ("skipping", named, {}),
        "is more than the 4 layers": (
            "llama",
            {**V, "pp_schedule": "Interleaved1F1B", "pp_stages_per_process": 3},
            {},
        ),
        "the forward of the model returns a SimpleNamespace": ("wrapping", named, {}),
        "has no such module": ("plain", {**named, "pp_split_points": ["fourth"]}, {}),
    }
    for found in run(2, cases):
        for words in cases:
            assert words in str(found[words]["error"])


@pytest.mark.slow
@pytest.mark.dist
def test_every_schedule_equals_one_process(run: Run) -> None:
    names = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    cases: dict[str, Case] = {name: ("llama", of_schedule(name), {}) for name in names}
    for name in names[2:4]:
        cases[f"{name} of a tie"] = ("tied", of_schedule(name), {})
    cases["few micro-batches"] = ("llama", of_schedule(names[3]), {"gradient_accumulation_steps": 1})
    check_equal(run, 2, cases)


@pytest.mark.slow
@pytest.mark.dist
def test_other_models_and_losses_in_stages(run: Run) -> None:
    cases: dict[str, Case] = {
        "experts": ("mixtral", TWO, {}),
        "gpt2, evaluated before": ("gpt2", TWO, {"evaluate_first": True}),
        "gemma3": ("gemma3", of_schedule("Interleaved1F1B"), {}),
        "qwen3": ("qwen3", TWO, {"gradient_checkpointing": True}),
        "recomputed zero bubble": ("llama", V, {"gradient_checkpointing": True}),
        "a sequence of layers": ("sequence", TWO, {"trainer": "sequence"}),
        "smoothed": ("llama", TWO, {"label_smoothing_factor": 0.1}),
        "the loss without logits": ("llama", TWO, {"own_loss": True}),
        "the model's own loss": ("llama", TWO, {"own_loss": True, "lean_loss": False}),
    }
    check_equal(run, 2, cases)


@pytest.mark.slow
@pytest.mark.dist
def test_replicas_of_pipelines_and_four_stages(run: Run) -> None:
    one = {"per_device_train_batch_size": 1}
    replicas: dict[str, Case] = {"replicas": ("llama", TWO, one), "tied replicas": ("tied", V, one)}
    check_equal(run, 4, replicas, {"per_device_train_batch_size": 2})
    check_equal(run, 4, {"four": ("tied", of_schedule("1F1B", 4), {})})


@pytest.mark.dist
def test_divided_and_sharded_stages_equal_one_process(run: Run) -> None:
    """A tie of two stages, whose parts and shards lie on both."""
    one = {"per_device_train_batch_size": 1}
    cases: dict[str, Case] = {"divided": ("tied", TENSOR, {}), "sharded": ("tied", SHARDS, one)}
    check_equal(run, 4, cases, {"per_device_train_batch_size": 2})


@pytest.mark.dist
def test_sharded_stages_compute_in_half_precision_as_a_whole_model_does(run: Run) -> None:
    """The layers of later stages too, with what the model derives from the dtype of its embedding."""
    half = {"per_device_train_batch_size": 1, "single": True, "bf16": True}
    whole = run(2, {"x": ("llama", {"dp_shard_size": 2}, half)})[0]["x"]
    for found in run(4, {"x": ("llama", SHARDS, half)}):
        for what, values in whole.items():
            difference = np.abs(np.array(found["x"][what]) - np.array(values)).max()
            assert difference <= 1e-6, f"{what}: off by {difference}"


@pytest.mark.dist
def test_fsdp2_begins_every_forward_of_a_stage(run: Run) -> None:
    """It waits for the optimizer only where it begins one, and it begins none before the last one has ended: that of
    the first stage, which does not return, as that of the last, which does. It reduces gradients once in an update.
    """
    case: Case = ("llama", SHARDS | of_schedule("GPipe"), {"per_device_train_batch_size": 1, "counted": True})
    found = run(4, {"x": (case[0], case[1], {**case[2], "max_steps": 2})})
    first, _, last, _ = (one["x"]["begun"][0] for one in found)
    assert first == last >= 2 * 3, "updates times micro-batches, and those of the start"
    for one in found:
        times, units = one["x"]["reduced"]
        assert times == 2 * units > 0, "once in an update, and not for each micro-batch"


@pytest.mark.dist
def test_stages_of_divided_rows_and_experts_equal_one_process(run: Run) -> None:
    """Rows also after an evaluation that came before the training."""
    cases: dict[str, Case] = {
        "rows": ("tied", ROWS, {"trainer": "own", "evaluate_first": True}),
        "experts": ("balanced", EXPERTS, {**BALANCED, "per_device_train_batch_size": 1}),
    }
    check_equal(run, 4, cases, {"per_device_train_batch_size": 2})


@pytest.mark.slow
@pytest.mark.dist
def test_balanced_experts_of_all_stages(run: Run) -> None:
    """Under each schedule, of layers that are computed again, of one stage alone, with micro-batches without weight."""
    names = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    recomputed = {**BALANCED, "gradient_checkpointing": True}
    cases: dict[str, Case] = {name: ("balanced", of_schedule(name), recomputed) for name in names}
    cases["of one stage"] = ("late experts", TWO, BALANCED)
    cases["few"] = ("balanced", of_schedule(names[2]), {**BALANCED, "gradient_accumulation_steps": 1})
    cases["own"] = ("balanced", TWO, {**BALANCED, "lean_loss": False})
    check_equal(run, 2, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [ROWS, TENSOR, {**TWO, "sp_size": 2}])
def test_balanced_experts_of_stages_with_other_axes(run: Run, layout: dict[str, Any]) -> None:
    check_equal(run, 4, {"x": ("balanced", layout, BALANCED)})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [ROWS, EXPERTS])
def test_killed_stages_of_balanced_experts_end_with_the_same_bits(
    run: Run, tmp_path: Path, layout: dict[str, Any]
) -> None:
    check_killed(run, main, tmp_path, ("balanced", layout, BALANCED), 4, (2, 3), updates=4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("changes", [{}, {"fsdp": True, "gradient_checkpointing": True}])
def test_schedules_of_divided_rows_and_experts(run: Run, schedule: str, changes: dict[str, Any]) -> None:
    one = {"per_device_train_batch_size": 1}
    cases: dict[str, Case] = {
        "rows": ("tied", ROWS | of_schedule(schedule), changes),
        "experts": ("qwen3_moe", EXPERTS | of_schedule(schedule), {**one, **changes}),
    }
    for name, case in cases.items():
        check_equal(run, 4, {name: case}, {"per_device_train_batch_size": 2})


@pytest.mark.slow
@pytest.mark.dist
def test_losses_and_models_in_stages_of_divided_rows(run: Run) -> None:
    heads: dict[str, Any] = {"pp_size": 2, "sp_size": 2}
    cases: dict[str, Case] = {
        "heads": ("llama", heads, {"trainer": "own"}),
        "an adapter": ("adapted tied", ROWS, {}),
        "the loss without logits": ("llama", ROWS, {"own_loss": True}),
        "the model's own loss": ("llama", ROWS, {"own_loss": True, "lean_loss": False}),
    }
    check_equal(run, 4, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "model", "rows"),
    [
        ({**EXPERTS, "cp_size": 2}, "mixtral", 1),
        ({**EXPERTS, "tp_size": 2}, "gpt_oss", 1),
        ({**ROWS, "tp_size": 2}, "tied", 2),
        ({**ROWS, "dp_shard_size": 2}, "tied", 1),
    ],
)
def test_stages_with_two_other_axes(run: Run, layout: dict[str, Any], model: str, rows: int) -> None:
    case: Case = (model, layout, {"per_device_train_batch_size": rows})
    check_equal(run, 8, {"x": case}, {"per_device_train_batch_size": 2})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [ROWS, EXPERTS])
def test_stages_of_divided_rows_and_experts_are_continued_on_any_layout(
    run: Run, tmp_path: Path, layout: dict[str, Any]
) -> None:
    model, rows = ("tied", 4) if layout == ROWS else ("mixtral", 2)
    other: Case = (model, {"dp_shard_size": 4}, {**SAVING, "per_device_train_batch_size": 1})
    case: Case = (model, layout, {**SAVING, "per_device_train_batch_size": rows})
    check_continued(run, tmp_path, {"x": case}, {"x": other}, 4, 4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("changes", [{}, {"fsdp": True}])
@pytest.mark.parametrize(("layout", "model"), [(ROWS, "tied"), (EXPERTS, "mixtral")])
def test_killed_stages_of_divided_rows_and_experts_end_with_the_same_bits(
    run: Run, tmp_path: Path, layout: dict[str, Any], model: str, changes: dict[str, Any]
) -> None:
    check_killed(run, main, tmp_path, (model, layout, changes), 4, (2, 3), updates=4)


@pytest.mark.slow
@pytest.mark.dist
def test_divided_and_sharded_stages_of_other_models_and_schedules(run: Run) -> None:
    one = {"per_device_train_batch_size": 1}
    wrapped = {"fsdp": "full_shard auto_wrap", **one}
    cases: dict[str, Case] = {
        f"{name} of {kind}": ("tied", layout | of_schedule(name), changes)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
        for kind, layout, changes in (("parts", TENSOR, {}), ("shards", SHARDS, one))
    }
    cases |= {
        "a vocabulary of 23": ("llama", TENSOR, {}),
        "norms of heads": ("qwen3", TENSOR, {"gradient_checkpointing": True}),
        "windows": ("gemma3", TENSOR, {}),
        "experts": ("mixtral", TENSOR, {}),
        "parts of learned positions": ("gpt2", TENSOR, {}),
        "no tie, units": ("llama", TWO, wrapped),
        "learned positions": ("gpt2", SHARDS, one),
        "recomputed shards": ("qwen3", SHARDS, {**one, "gradient_checkpointing": True}),
        "a loss of the script's": ("llama", TENSOR, {"trainer": "own"}),
        "an adapter": ("adapted llama", TENSOR, {}),
        "an adapter in shards": ("adapted tied", SHARDS, one),
        "the loss without logits": ("llama", TENSOR, {"own_loss": True}),
        "the model's own loss": ("llama", TENSOR, {"own_loss": True, "lean_loss": False}),
    }
    check_equal(run, 4, cases, {"per_device_train_batch_size": 2})


@pytest.mark.slow
@pytest.mark.dist
def test_stages_with_two_other_axes_equal_one_process(run: Run) -> None:
    one = {"per_device_train_batch_size": 1}
    cases: dict[str, Case] = {
        "replicas of parts": ("tied", TENSOR, one),
        "shards of parts": ("tied", {**TENSOR, "dp_shard_size": 2}, one),
        "replicas of shards": ("llama", {**TWO, "dp_replicate_size": 2, "dp_shard_size": 2}, one),
    }
    whole = {"replicas of shards": {"per_device_train_batch_size": 4}}
    for name, case in cases.items():
        check_equal(run, 8, {name: case}, whole.get(name, {"per_device_train_batch_size": 2}))


@pytest.mark.dist
def test_divided_stages_are_continued_on_any_layout(run: Run, tmp_path: Path) -> None:
    shards: Case = ("tied", SHARDS, {**SAVING, "per_device_train_batch_size": 1})
    check_continued(run, tmp_path, {"x": ("tied", TENSOR, SAVING)}, {"x": shards}, ranks=4, first=4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [TWO, TENSOR])
def test_adapters_of_stages_are_continued_on_any_layout(
    run: Run, tmp_path: Path, layout: dict[str, Any]
) -> None:
    shards: Case = ("adapted tied", SHARDS, {**SAVING, "per_device_train_batch_size": 1})
    first = 4 if "tp_size" in layout else 2
    check_continued(
        run, tmp_path, {"x": ("adapted tied", layout, SAVING)}, {"x": shards}, ranks=4, first=first
    )


@pytest.mark.dist
def test_a_killed_run_of_divided_stages_ends_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    said = check_killed(run, main, tmp_path, ("tied", TENSOR, {}), 4, (2,), updates=4)
    assert re.search(r"This was rank \d of 4 \(pipeline \d, tensor \d\), at step \d", said), said[-3000:]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [TWO | {"dp_replicate_size": 2}, V | {"tp_size": 2}, SHARDS])
def test_killed_runs_of_stages_end_with_the_same_bits(
    run: Run, tmp_path: Path, layout: dict[str, Any]
) -> None:
    check_killed(run, main, tmp_path, ("dropping", layout, {}), 4, (2, 3, 5))


@pytest.mark.slow
@pytest.mark.dist
def test_sharded_stages_are_continued_to_the_bit_and_on_any_layout_and_back(run: Run, tmp_path: Path) -> None:
    case: Case = ("tied", SHARDS, {**SAVING, "per_device_train_batch_size": 1})
    expected = run(4, {"x": case}, tmp_path / "same")[0]["x"]["weights"]
    layouts: dict[str, tuple[int, Case]] = {
        "one process": (1, ("tied", {}, SAVING)),
        "parts": (4, ("tied", TENSOR, SAVING)),
        "stages": (2, ("tied", TWO, SAVING)),
    }
    rewind(tmp_path / "same")
    for name in layouts:
        shutil.copytree(tmp_path / "same", tmp_path / name)
    assert run(4, resumed({"x": case}), tmp_path / "same")[0]["x"]["weights"] == expected, "to the bit"
    longer: Case = (case[0], case[1], {**case[2], "max_steps": 8})
    onward = np.array(run(4, resumed({"x": longer}), tmp_path / "same")[0]["x"]["weights"])
    for name, (ranks, other) in layouts.items():
        found = run(ranks, resumed({"x": other}), tmp_path / name)[0]["x"]["weights"]
        assert np.abs(np.array(found) - np.array(expected)).max() <= DOUBLE, name
        back = run(4, resumed({"x": longer}), tmp_path / name)[0]["x"]["weights"]
        assert np.abs(np.array(back) - onward).max() <= DOUBLE, f"{name}, and back"


@pytest.mark.dist
def test_stages_are_continued_to_the_bit_and_on_one_process(run: Run, tmp_path: Path) -> None:
    check_continued(run, tmp_path, {"tied": ("tied", TWO, SAVING)}, {"tied": ("tied", V, SAVING)})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "changes"), [(of_schedule("GPipe", 4), {}), (TWO, {"per_device_train_batch_size": 1})]
)
def test_stages_are_continued_as_more_stages_and_as_replicas(
    run: Run, tmp_path: Path, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    cases: dict[str, Case] = {"tied": ("tied", V, SAVING)}
    check_continued(run, tmp_path, cases, {"tied": ("tied", layout, {**SAVING, **changes})}, ranks=4)


@pytest.mark.dist
def test_dropout_and_a_tie_are_the_same_after_a_resume(run: Run, tmp_path: Path) -> None:
    whole, last = (found["drops"] for found in run(2, {"drops": ("dropping", TWO, SAVING)}, tmp_path))
    assert whole["head"] == last["head"], "both stages have the bits of the tie"
    rewind(tmp_path)
    again = run(2, {"drops": ("dropping", TWO, {**SAVING, "resume": True})}, tmp_path)[0]["drops"]
    assert again["weights"] == whole["weights"]
