"""One run of `gpu.py`: trains with one loop and prints its figures as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, default_collate

LEARNING_RATE, CLIP = 1e-4, 1.0


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens: throughput does not depend on what they say. `labels` equal the inputs; the model shifts them."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock:
    """Stamps two updates, the device idle at both: the last of the warm-up and the last but one of the run."""

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self._first, self._last, self._device = first, last, device
        self._updates = 0
        self._stamps: list[float] = []

    def __call__(self, *_: object) -> None:
        self._updates += 1
        if self._updates in (self._first, self._last):
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            self._stamps.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> float:
        start, end = self._stamps
        return (end - start) / (self._last - self._first)


def build(tiny: bool, length: int) -> nn.Module:
    """A Llama of about 1.04 B parameters (tied embeddings), or a toy of the same make; weights in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": max(length, 8192),
    }  # fmt: skip
    if tiny:
        sizes.update(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        sizes.update(num_key_value_heads=2, vocab_size=128)
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    with torch.device("cpu" if tiny else "cuda"):  # a billion random weights are drawn there in no time
        return LlamaForCausalLM(config)


def _batches(data: Tokens, micro_batch: int, steps: int) -> Iterator[dict[str, Tensor]]:
    loader = DataLoader(data, micro_batch, shuffle=True, collate_fn=default_collate, pin_memory=True)
    done = 0
    while True:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def raw(model: nn.Module, data: Tokens, asked: dict[str, Any], device: torch.device) -> list[float]:
    """What a person would write: autocast, clipping, fused AdamW; the losses stay on the device until the end."""
    model.to(device).train()
    step_model = torch.compile(model) if asked["compile"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for batch in _batches(data, asked["micro_batch"], asked["steps"]):
        moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss = step_model(**moved)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses[0].item(), losses[-1].item()]


def trainer(library: Any, model: nn.Module, data: Tokens, asked: dict[str, Any]) -> list[float]:
    more: dict[str, Any] = {}
    if asked["layout"]:
        more = {"parallelism_config": asked["layout"], "gradient_checkpointing": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder, max_steps=asked["steps"], per_device_train_batch_size=asked["micro_batch"], bf16=True,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", optim="adamw_torch_fused", max_grad_norm=CLIP,
            torch_compile=asked["compile"], logging_steps=asked["steps"] - 1, logging_first_step=True,
            save_strategy="no", disable_tqdm=True, use_cpu=asked["tiny"], report_to="none", **more,
        )  # fmt: skip
        made = library.Trainer(model, arguments, train_dataset=data, data_collator=default_collate)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return [losses[0], losses[-1]]


def run(asked: dict[str, Any]) -> dict[str, Any]:
    device = torch.device("cpu" if asked["tiny"] else "cuda")
    torch.set_float32_matmul_precision("high")
    model = build(asked["tiny"], asked["length"])
    config: Any = model.config
    data = Tokens(max(64, 4 * asked["micro_batch"]), asked["length"], config.vocab_size)
    clock = Clock(asked["warmup"], asked["steps"] - 1, device)
    handle = register_optimizer_step_post_hook(clock)
    if asked["loop"] == "raw":
        losses = raw(model, data, asked, device)
    else:
        losses = trainer(__import__(asked["loop"]), model, data, asked)
    handle.remove()
    return {
        "tokens_per_second": asked["micro_batch"] * asked["length"] / clock.seconds_per_step,
        "peak_bytes": 0 if device.type == "cpu" else torch.cuda.max_memory_allocated(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers, "width": config.hidden_size, "length": asked["length"],
        "first_loss": losses[0], "last_loss": losses[1],
    }  # fmt: skip


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        figures = run(json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
