"""How the effect of each feature shows. A check raises AssertionError if what was asked for had none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.reliability.combined.losses import FACTOR
from tests.reliability.combined.models import TRAIN_ROWS
from tests.reliability.combined.recipe import Effect
from tests.reliability.combined.training import settings


def nothing(effect: Effect) -> None:
    """The other questions are about it: it changes how a run is made or written, not what it does."""


def close(ours: Any, theirs: Any, tolerance: float) -> bool:
    return bool(ours == pytest.approx(theirs, rel=tolerance, abs=tolerance))


def losses_are_others(effect: Effect) -> None:
    assert effect.whole.series("loss") != effect.without.series("loss"), "the losses are those without it"


def losses_are_the_same(effect: Effect) -> None:
    assert effect.whole.series("loss") == effect.without.series("loss"), "the losses are not those without it"


def losses_are_close(effect: Effect) -> None:
    """The same up to rounding, which layers in single precision amplify."""
    ours, theirs = effect.whole.series("loss"), effect.without.series("loss")
    assert close(ours, theirs, max(1e-5, effect.recipe.tolerance)), f"{ours}, not {theirs}"


def rows_are_shorter(effect: Effect) -> None:
    losses_are_close(effect)
    ours, theirs = effect.whole.series("num_tokens"), effect.without.series("num_tokens")
    assert ours == theirs, "other tokens are counted"


def weights_are_spread(effect: Effect) -> None:
    divided = any(size > 1 for axis, size in effect.recipe.axes.items() if axis != "cp_size")
    share, sharded = effect.whole.seen["share"], divided or effect.recipe.strategy in ("fsdp2", "zero3")
    assert len(effect.whole.bits) == effect.recipe.world
    assert (share < 0.9) == sharded, f"a rank holds {share:.2f} of the weights"


def weights_are_on_the_accelerator(effect: Effect) -> None:
    assert "cpu" not in effect.whole.seen["devices"], f"weights are on {effect.whole.seen['devices']}"


def optimizer_is_another(effect: Effect) -> None:
    ours, theirs = (outcome.seen.get("optimizer") for outcome in (effect.whole, effect.without))
    if effect.value == "adamw_8bit":
        # bitsandbytes keeps 32 bits for tensors of fewer than 4,096 numbers (all are here) and computes as torch does.
        assert "bnb" in ours, ours
    elif effect.value not in ("adamw_torch_fused", "adamw_anyprecision"):  # the same here
        assert effect.whole.series("loss") != effect.without.series("loss"), (
            f"{ours} gives what {theirs} gives"
        )
    assert effect.whole.seen["moved"], "no parameter has moved"


def updates_of(effect: Effect) -> int:
    """How many updates the arguments ask for."""
    asked = settings(effect.recipe)
    if asked["max_steps"] > 0:
        return int(asked["max_steps"])
    micro = TRAIN_ROWS / (asked["per_device_train_batch_size"] * effect.recipe.data_ranks)
    micro = math.floor(micro) if asked.get("dataloader_drop_last") else math.ceil(micro)
    return math.ceil(asked["num_train_epochs"] * math.ceil(micro / effect.recipe.accumulation))


def updates_are_those_of_the_rows(effect: Effect) -> None:
    assert effect.whole.seen["updates"] == updates_of(effect)


def rates_are_those_of_the_formula(effect: Effect) -> None:
    """The formula is that of transformers, which is not read here."""
    from transformers import get_scheduler

    asked, rates = settings(effect.recipe), effect.whole.seen["rates"]
    name, total = asked.get("lr_scheduler_type", "linear"), updates_of(effect)
    warmup = float(asked.get("warmup_steps", 0))
    steps = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    if asked["optim"].startswith("schedule_free"):
        assert effect.whole.seen["warm-up"] == steps, (
            f"warms up for {effect.whole.seen['warm-up']}, not {steps}"
        )
        return
    peak, asked_peak = effect.whole.seen["peaks"][0][0], asked["learning_rate"]  # a group may have its own
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=asked_peak)
    schedule = get_scheduler(
        name, optimizer, steps, total, scheduler_specific_kwargs=asked.get("lr_scheduler_kwargs")
    )
    for update, groups in enumerate(rates):
        wanted = optimizer.param_groups[0]["lr"] * peak / asked_peak
        assert close(groups[0], wanted, 1e-9), f"rate of update {update + 1}: {groups[0]}, not {wanted}"
        optimizer.step()
        schedule.step()


def rates_fall(effect: Effect) -> None:
    first = [groups[0] for groups in effect.whole.seen["rates"]]
    assert first == sorted(first, reverse=True), f"rates rise: {first}"
    assert first[-1] < first[0], f"rates do not fall: {first}"


def tokens_are_counted(effect: Effect) -> None:
    counts = effect.whole.series("num_input_tokens_seen")
    assert counts, "no count"
    assert counts == sorted(counts), f"counts fall: {counts}"
    assert counts[-1] > 0, f"counts: {counts}"


def micro_batches_are_counted(effect: Effect) -> None:
    """At the end of an epoch, an update may have fewer."""
    seen, updates = effect.whole.seen, updates_of(effect)
    assert seen["updates"] == updates
    assert updates < seen["forwards"] <= updates * effect.recipe.accumulation + 2, (
        f"{seen['forwards']} forwards in {updates} updates"
    )


def layers_compute_in_it(effect: Effect) -> None:
    wanted = "bfloat16" if effect.value == "bf16" else "float16"
    assert wanted in effect.whole.seen["dtypes"], f"linear layers give {effect.whole.seen['dtypes']}"


def evaluation_is_coarser(effect: Effect) -> None:
    assert effect.whole.evaluated != effect.without.evaluated
    assert effect.whole.series("loss") == effect.without.series("loss"), "it changed the training"


def base_is_frozen(effect: Effect) -> None:
    added = ("lora_", "ia3_", "modules_to_save", "prompt_encoder")
    moved = effect.whole.seen["moved"]
    assert moved, "nothing moved"
    assert all(any(part in name for part in added) for name in moved), f"of the base moved {moved[:3]}"


def rows_are_joined(effect: Effect) -> None:
    ours, theirs = (
        [width[0] for width in outcome.seen["widths"]] for outcome in (effect.whole, effect.without)
    )
    longest = max(width[1] for width in effect.whole.seen["widths"])
    before = max(width[1] for width in effect.without.seen["widths"])
    assert longest > before, f"rows of {longest} tokens, and of {before} without: {ours[:3]} for {theirs[:3]}"


def weights_are_the_average(effect: Effect) -> None:
    if "from average" in effect.whole.seen:
        assert effect.whole.seen["from average"] < 1e-5, "the weights are not the average of those trained"
    assert effect.whole.series("loss") == effect.without.series("loss"), "it changed the training"
    if not effect.recipe.arguments.get("bf16_full_eval"):  # whose losses are too coarse to tell
        assert effect.whole.evaluated != effect.without.evaluated, "the evaluation is that of trained weights"


def losses_are_those_of_the_function(effect: Effect) -> None:
    """All compute the mean over targets, some times a factor: the first loss is before any update."""
    factor = FACTOR if effect.value == "func_factor" else 1.0
    if effect.recipe.kind == "loop":
        return  # the log is the loop's own; its bits and its evaluation are compared
    ours, theirs = effect.whole.series("loss")[0], factor * effect.without.series("loss")[0]
    tolerance = 5e-2 if effect.recipe.draws else max(1e-4, effect.recipe.tolerance)
    assert close(ours, theirs, tolerance), f"first loss {ours}, not {theirs}"


def norms_are_clipped(effect: Effect) -> None:
    limit = float(effect.value)
    if effect.recipe.strategy.startswith("zero"):
        return  # the engine clips inside its step
    for update, norm in enumerate(effect.whole.seen["norms"]):
        assert norm <= limit * 1.01, f"norm {norm} of update {update + 1}"
    assert min(effect.whole.series("grad_norm")) > limit, "nothing was there to clip"


def layers_run_again(effect: Effect) -> None:
    ours, theirs = (outcome.seen["layers"] for outcome in (effect.whole, effect.without))
    assert ours > theirs, f"{ours} forwards of linear layers, and {theirs} without"
    assert close(effect.whole.series("loss"), effect.without.series("loss"), effect.recipe.tolerance), (
        "the losses are not those without it"
    )


def groups_have_their_rate(effect: Effect) -> None:
    peaks = {round(rate, 9) for groups in effect.whole.seen["peaks"] for rate in groups}
    assert 3e-3 in peaks, f"no group has the rate 0.003: {peaks}"


def layers_have_their_rates(effect: Effect) -> None:
    peaks = {round(rate, 9) for groups in effect.whole.seen["peaks"] for rate in groups}
    assert len(peaks) >= 2, f"rates of the groups: {peaks}"


def evaluations_are_logged(effect: Effect) -> None:
    updates = effect.whole.seen["updates"]
    steps = [row["step"] for row in effect.whole.rows if "eval_loss" in row]
    if effect.value == "epoch":
        assert steps, "no evaluation"
        return
    every = 2 if effect.value == "steps" else 3
    wanted = [0] * (effect.value == "start") + [step for step in range(1, updates + 1) if step % every == 0]
    assert [step for step in steps if step < updates] == [step for step in wanted if step < updates]


def checkpoints_are_there(effect: Effect) -> None:
    found, updates = effect.whole.seen["checkpoints"], effect.whole.seen["updates"]
    if effect.value == "no":
        assert not found, f"saved at {found}"
    elif effect.value == "one":
        assert found == [updates], f"saved at {found}"
    elif effect.value == "each":
        assert found == list(range(max(1, updates - 2), updates + 1)), f"saved at {found}"
    else:
        assert found, "no checkpoint"


def best_is_loaded(effect: Effect) -> None:
    best = min(effect.whole.series("eval_loss"))
    assert close(effect.whole.evaluated, best, 1e-6), (
        f"{effect.whole.evaluated} at the end, and {best} at best"
    )


def losses_are_means(effect: Effect) -> None:
    """Of the updates since the last report."""
    single, joined = effect.without.series("loss"), effect.whole.series("loss")
    for number, mean in enumerate(joined[: len(single) // 3]):
        assert close(mean, sum(single[3 * number : 3 * number + 3]) / 3, 1e-3), f"{mean} for {single}"
