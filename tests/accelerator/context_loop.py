"""A loop of the user's own, the same on one process and on ranks that divide the sequences of its batches."""

from __future__ import annotations

from typing import Any

import torch
from tests.trainer.context_cases import collate, model, samples, token_loss

from windlass import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from windlass.dist.sharded import whole


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
