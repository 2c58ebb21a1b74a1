"""A loop of the user's own trains replicas of divided layers as one process does, in whichever form it is written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.context_cases import model, token_loss
from torch import Tensor

from windlass import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from windlass.dist.sharded import whole

pytest.importorskip("transformers")
FORMS = ("accumulated", "each", "twice", "held", "bare", "recomputed", "unfrozen")


def check(layout: dict[str, object], *cases: str) -> None:
    [expected] = on_ranks(1, main, {}, cases)
    for rank, found in enumerate(on_ranks(4, main, layout, cases)):
        for case in cases:
            for what, values in expected[case].items():
                difference = np.abs(np.array(found[case][what]) - np.array(values)).max()
                assert difference <= 1e-10, (rank, case, what, difference)


@pytest.mark.dist
def test_replicas_of_divided_layers() -> None:
    check({"tp_size": 2, "dp_replicate_size": 2}, "qwen3/accumulated", "qwen3/each", "qwen3/twice")


@pytest.mark.dist
def test_sharded_divided_layers() -> None:
    check({"tp_size": 2, "dp_shard_size": 2, "sharded": True}, "qwen3/accumulated", "qwen3/twice")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "even", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_form_of_a_loop(name: str, sharded: bool) -> None:
    layout: dict[str, object] = {"tp_size": 2, "dp_replicate_size": 2}
    if sharded:
        layout = {"tp_size": 2, "dp_shard_size": 2, "sharded": True}
    check(layout, *(f"{name}/{form}" for form in FORMS))


# --- what each rank runs ----------------------------------------------------------------------------------------------


_ROWS = 8  # of a micro-batch, over all replicas


def train(name: str, case: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Train with a loop of the form that `case` names. Returns the norms, and losses and weights after training."""
    sharded = layout.pop("sharded", False)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**layout) if layout else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=True) if sharded else None,
    )
    net = model(name)
    if case == "recomputed":
        net.gradient_checkpointing_enable({"use_reentrant": False})
        net.train()
    if case == "unfrozen":
        net.model.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=0.02, eps=1e-4
    )  # of a gradient near zero it would enlarge rounding
    torch.manual_seed(1)
    rows = [{"input_ids": torch.randint(3, 23, (9,))} for _ in range(4 * _ROWS)]
    replicas = accelerator.num_processes // layout.get("tp_size", 1)
    loader = torch.utils.data.DataLoader(rows, batch_size=_ROWS // replicas)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    norms = [_train_batch(accelerator, net, optimizer, batch, case, n) for n, batch in enumerate(loader)]
    net.eval()
    with torch.no_grad():
        losses = [
            float(
                accelerator.gather_for_metrics(token_loss(net(**batch), batch["input_ids"]).repeat(8)).mean()
            )
            for batch in loader
        ]
    weights = torch.cat([whole(parameter).detach().flatten() for parameter in net.parameters()])
    accelerator.free_memory()
    return {"norms": [n for n in norms if n is not None], "losses": losses, "weights": weights.tolist()}


def _train_batch(
    accelerator: Accelerator, net: Any, optimizer: Any, batch: dict[str, Tensor], case: str, number: int
) -> float | None:
    """One micro-batch. Returns the norm of its update, if it ends one."""
    last = number % 2 == 1
    with contextlib.ExitStack() as stack:
        if case == "held":
            stack.enter_context(contextlib.nullcontext() if last else accelerator.no_sync(net))
        elif case != "each":
            stack.enter_context(accelerator.accumulate(net))
            last = accelerator.sync_gradients
        for _ in range(2 if case == "twice" else 1):
            loss = token_loss(net(**batch), batch["input_ids"])
            loss.backward() if case == "bare" else accelerator.backward(loss)
        if case != "each" and not last:
            return None
        order = (2.0, 1.0, math.inf)[number // 2 % 3]
        norm = float(accelerator.clip_grad_norm_(net.parameters(), 0.3 if order < 3 else 0.01, order))
        optimizer.step()
        optimizer.zero_grad()
    if case == "unfrozen":
        net.requires_grad_(False)
        accelerator.unwrap_model(net).get_submodule("model.layers.1").requires_grad_(True)
    return norm


def main(layout: dict[str, Any], cases: Iterable[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        name, form = case.split("/")
        found[case] = train(name, form, dict(layout))
    return found
