"""What a run on preferences depends on beside its pairs: the split of an update into micro-batches and ranks.

TRL's `DPOTrainer` and Windlass' train the same small Llama in double precision on the same pairs of unequal length,
eight an update: at once, as four micro-batches, and in two processes. Written is by how much the loss, the norm of the
gradient, the figures of the log and the weights after the updates differ from those of the first way, the largest
relative difference of each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import PACKAGES, caption, facts, report, table
from preferences import tokenizer

LABELS = {"trl": "TRL, `DPOTrainer`", "windlass": "windlass, `DPOTrainer`"}
LOSSES = {"sigmoid": ["sigmoid"], "sigmoid + sft": ["sigmoid", "sft"]}
# Pairs of a micro-batch, micro-batches and processes of an update.
WAYS = {"four micro-batches": (2, 4, 1), "two processes": (4, 1, 2)}
_FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logits/chosen", "rewards/margins")
_VOCABULARY, _UPDATES = 64, 3


def pairs() -> list[dict[str, str]]:
    """Rows of words, with answers of 2 to 24 tokens."""
    import numpy as np

    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{at}" for at in draw.integers(0, _VOCABULARY - 3, count))

    return [
        {name: f" {words(int(draw.integers(2, 25)))}" for name in ("prompt", "chosen", "rejected")}
        for _ in range(8 * _UPDATES)
    ]


def worker(name: str, loss: list[str], size: int, accumulation: int) -> None:
    """A run of this process, or of its job: figures of each update, and the weights, as JSON."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    library: Any = importlib.import_module(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model, reference = LlamaForCausalLM(config).double(), LlamaForCausalLM(config).double()
    args = library.DPOConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_steps=_UPDATES, per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation, save_strategy="no", logging_steps=1, disable_tqdm=True,
        train_sampling_strategy="sequential", loss_type=loss,
    )  # fmt: skip
    trainer = library.DPOTrainer(
        model,
        reference,
        args,
        train_dataset=Dataset.from_list(pairs()),
        processing_class=tokenizer(_VOCABULARY),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    if int(os.environ.get("RANK", "0")) == 0:
        found = {figure: [row[figure] for row in rows] for figure in _FIGURES}
        print("FOUND", json.dumps({**found, "weights": weights.tolist()}))


def run_of(
    name: str, loss: list[str], size: int, accumulation: int, processes: int
) -> dict[str, list[float]]:
    """The figures of a run in processes of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [__file__, f"--worker={name}", f"--split={size},{accumulation}", f"--loss={','.join(loss)}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND"))  # type: ignore[no-any-return]


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference, relative to the largest value."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(map(abs, one))


def run() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for loss, kinds in LOSSES.items():
        for name in LABELS:
            whole = run_of(name, kinds, 8, 1, 1)
            for way, split in WAYS.items():
                other = run_of(name, kinds, *split)
                key = f"{name}|{loss}|{way}"
                found[key] = {figure: difference(whole[figure], other[figure]) for figure in whole}
    return found


def render(figures: dict[str, Any]) -> str:
    rows = []
    for key, found in figures["differences"].items():
        name, loss, way = key.split("|")
        rows.append([LABELS[name], loss, way, *(f"{found[figure]:.0e}" for figure in (*_FIGURES, "weights"))])
    head = ["trainer", "loss", "split", *(f"`{figure}`" for figure in _FIGURES), "weights"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--split", default="8,1", help=argparse.SUPPRESS)
    parser.add_argument("--loss", default="sigmoid", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.loss.split(","), *map(int, options.split.split(",")))
        return
    figures = {**facts((*PACKAGES, "trl")), "differences": run()}
    report("preference-splits", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
