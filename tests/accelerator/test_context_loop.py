"""A loop of the user's own trains on divided sequences as on one process; loaders give all ranks the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.context_cases import collate, model, samples, token_loss

from windlass import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from windlass.dist.sharded import whole

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "strategy"),
    [
        ({"cp_size": 2}, "sharded"),
        pytest.param({"sp_size": 2}, "replicated", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_loop_on_two_ranks_equals_one_process(parallel: dict[str, int], strategy: str) -> None:
    for found, expected in figures(parallel, strategy, "no"):
        for what, values in expected.items():
            assert np.abs(np.array(found[what]) - np.array(values)).max() <= 1e-10, what


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_loop_in_mixed_precision_is_divided_too(precision: str) -> None:
    """What a layout compares before the start is computed in the precision of the weights. Losses and norms are equal
    up to rounding.
    """
    for found, expected in figures({"sp_size": 2}, "replicated", precision):
        assert found["reported"] == pytest.approx(expected["reported"], rel=0.02)


def figures(parallel: dict[str, int], strategy: str, precision: str) -> Iterator[Any]:
    """What each of two ranks and what one process comes to."""
    [expected] = on_ranks(1, train, {}, False, precision)
    for found in on_ranks(2, train, parallel, strategy == "sharded", precision):
        yield found, expected


# --- what each rank runs ----------------------------------------------------------------------------------------------


def train(parallel: dict[str, int], sharded: bool, precision: str) -> dict[str, Any]:
    """`precision`: "no" for float64 throughout, or mixed precision of weights in float32."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**parallel) if parallel else None,
        fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None,
    )
    net = model("llama") if precision == "no" else model("llama").float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(samples(16), batch_size=2, collate_fn=collate)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    reported = []
    for batch in loader:
        buffers = [batch["input_ids"], batch["labels"]]
        with (
            accelerator.accumulate(net),
            accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1]),
        ):
            labels = batch.pop("labels")
            if not (labels[:, 1:] != -100).any():
                continue
            loss = token_loss(net(**batch), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                reported.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        reported.append(float(loss))
    net.eval()
    evaluated = []
    with torch.no_grad():
        for batch in loader:
            logits = net(input_ids=batch["input_ids"]).logits[:, :3].contiguous()
            evaluated.append(float(accelerator.gather_for_metrics(logits).sum()))
    weights = [whole(parameter).detach().flatten() for parameter in net.parameters()]
    divided = "context" if parallel.get("tp_size", 1) == 1 else "tensor"
    assert not parallel or getattr(accelerator, f"{divided}_parallel_rank") == accelerator.process_index
    return {"reported": reported, "evaluated": evaluated, "weights": torch.cat(weights).tolist()}
