"""The contenders of `distributed.py`: one small language model, one dataset, four loops, four strategies.

Started by it, once for each rank, as `distributed_contenders.py STRATEGY NAME STEPS`; answers each line on stdin with
the stamps of one round (ns) on stdout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, SAMPLES = 4, 32, 2000, 256, 4, 4000
LEARNING_RATE, CLIP, LOG_EVERY = 1e-3, 1.0, 20
Stamps = list[int]


class Block(nn.Module):
    """Causal attention with four heads and a feed-forward part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    """A small language model that notes the time of each call, so that every loop is timed by the same clock."""

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.stamps = stamps
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.stamps.append(time.perf_counter_ns())
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Samples(Dataset[dict[str, Tensor]]):
    """Random tokens, each to be followed by the next."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def _loader(samples: Samples, **options: Any) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(samples, batch_size=BATCH, collate_fn=default_collate, **options)


def _optimizer(model: nn.Module, strategy: str) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if _stage(strategy) is not None:  # as a Trainer makes them: the engine sums and gathers each by itself
        decayed = [name.endswith("weight") and "norm" not in name for name, _ in model.named_parameters()]
        chosen = list(zip(decayed, model.parameters(), strict=True))
        groups = [{"params": [p for is_decayed, p in chosen if is_decayed is kind]} for kind in (True, False)]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def _spread(model: Model, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _stage(strategy: str) -> int | None:
    """The stage of ZeRO; None without DeepSpeed."""
    return int(strategy.removeprefix("zero")) if strategy.startswith("zero") else None


def _engine_config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": CLIP}


def _engine_loop(strategy: str, model: Model, samples: Samples, steps: int) -> None:
    """As DeepSpeed's documentation has it: its engine clips, and divides what PyTorch's optimizer updates."""
    import deepspeed

    stage = _stage(strategy)
    assert stage is not None
    config = {
        **_engine_config(stage), "train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_optimizer(model, strategy), config=config, dist_init_required=False
    )
    sampler = DistributedSampler(samples)
    loader, total, step, epoch = _loader(samples, sampler=sampler), torch.zeros(()), 0, 0
    engine.train()
    while step < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            engine.step()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                print({"step": step, "loss": total.item() / LOG_EVERY})
                total.zero_()
            if step == steps:
                break
    engine.destroy()


def raw(strategy: str, model: Model, samples: Samples, steps: int) -> None:
    """The loop that a person would write, with clipping and a loss that is read when it is logged."""
    if _stage(strategy) is not None:
        _engine_loop(strategy, model, samples, steps)
        return
    spread = _spread(model, strategy)
    optimizer, sampler = _optimizer(spread, strategy), DistributedSampler(samples)
    loader, total, step, epoch = _loader(samples, sampler=sampler), torch.zeros(()), 0, 0
    spread.train()
    while step < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            loss = spread(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(spread.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                print({"step": step, "loss": total.item() / LOG_EVERY})
                total.zero_()
            if step == steps:
                return


def _user_loop(accelerator: Any, strategy: str, model: Model, samples: Samples, steps: int) -> None:
    """The loop of the guides, for any library with an `Accelerator`."""
    prepared, optimizer, loader = accelerator.prepare(
        model, _optimizer(model, strategy), _loader(samples, shuffle=True)
    )
    total, step = torch.zeros(()), 0
    prepared.train()
    while step < steps:
        for batch in loader:
            loss = prepared(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % LOG_EVERY == 0:
                print({"step": step, "loss": total.item() / LOG_EVERY})
                total.zero_()
            if step == steps:
                return


PLUGIN = {
    "fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]
}  # fmt: skip


def accelerate(strategy: str, model: Model, samples: Samples, steps: int) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    if strategy == "fsdp":
        # On processors it leaves the plugin aside without a word and replicates; its state has to be told.
        AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(**PLUGIN)
        for state in (PartialState(), AcceleratorState()):
            state.distributed_type = DistributedType.FSDP
        assert accelerator.is_fsdp2
    _user_loop(accelerator, strategy, model, samples, steps)


def accelerator(strategy: str, model: Model, samples: Samples, steps: int) -> None:
    from windlass import Accelerator
    from windlass.compat.plugin_engines import DeepSpeedPlugin
    from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin

    stage = _stage(strategy)
    made = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**PLUGIN) if strategy == "fsdp" else None,
        deepspeed_plugin=None if stage is None else DeepSpeedPlugin(hf_ds_config=_engine_config(stage)),
    )
    _user_loop(made, strategy, model, samples, steps)
    made.free_memory()


def trainer(strategy: str, model: Model, samples: Samples, steps: int) -> None:
    import windlass

    sharding: dict[str, Any] = {}
    if strategy == "fsdp":
        sharding = {
            "fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}
        }  # fmt: skip
    stage = _stage(strategy)
    if stage is not None:
        sharding = {"deepspeed": _engine_config(stage)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = windlass.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            optim="adamw_torch_fused", max_grad_norm=CLIP, logging_steps=LOG_EVERY, save_strategy="no",
            remove_unused_columns=False, disable_tqdm=True, use_cpu=True, report_to="none", **sharding,
        )  # fmt: skip
        windlass.Trainer(model, arguments, train_dataset=samples, data_collator=default_collate).train()


LOOPS: dict[str, Callable[[str, Model, Samples, int], None]] = {
    "raw": raw, "accelerator": accelerator, "trainer": trainer, "accelerate": accelerate,
}  # fmt: skip
PACKAGES = {"accelerate": "accelerate", "accelerator": "windlass", "trainer": "windlass"}


def _round(strategy: str, name: str, samples: Samples, steps: int) -> Stamps:
    stamps: Stamps = []
    torch.manual_seed(0)
    # The pipe carries figures alone: whatever a library prints goes nowhere.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        LOOPS[name](strategy, Model(stamps), samples, steps)
    return stamps


def main() -> None:
    strategy, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    needed = [PACKAGES[name]] if name in PACKAGES else []
    needed += ["deepspeed"] if _stage(strategy) is not None else []
    if any(importlib.util.find_spec(package) is None for package in needed):
        print(json.dumps("missing"), flush=True)
        return
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    if len(cores) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    if name == "raw":
        dist.init_process_group("gloo")
    samples = Samples()
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(_round(strategy, name, samples, steps)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
