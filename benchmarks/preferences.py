"""Preferences (DPO) beside TRL: tokens per second, and the highest memory, at a large vocabulary.

Both trainers train the same small Llama (two layers, tied embeddings, `--vocabulary` classes) on the same pairs, with a
copy of it as the reference, in float32 without recomputation. Memory is the highest during updates, above what is
in use before them. Contenders run in fresh processes of one thread and take turns for `--rounds` rounds; the best of
each counts. Seconds are processor time, which other programs on the machine change least.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import PACKAGES, caption, facts, report, table
from loss_memory import Memory

LABELS = {"trl": "TRL, `DPOTrainer`", "windlass": "windlass, `DPOTrainer`"}
_SKIPPED = 1  # the first update warms caches up


def pairs(options: argparse.Namespace) -> list[dict[str, str]]:
    """Rows of words, all of one length, each word a token."""
    import numpy as np

    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{at}" for at in draw.integers(0, options.vocabulary - 3, count))

    count = options.batch * (options.updates + _SKIPPED)
    return [
        {
            "prompt": words(options.prompt),
            "chosen": f" {words(options.answer)}",
            "rejected": f" {words(options.answer)}",
        }
        for _ in range(count)
    ]


def tokenizer(vocabulary: int) -> Any:
    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{at}" for at in range(vocabulary - 3))]
    inner = tk.Tokenizer(tk.models.WordLevel({n: at for at, n in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def contender(name: str, options: argparse.Namespace) -> dict[str, float]:
    """A run in this process: tokens per second after the first update, and bytes."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    library: Any = importlib.import_module(name)

    def model() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
                num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip

    memory = Memory("cpu")
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == _SKIPPED:
                memory.reset()
                moments.append(time.process_time())

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            moments.append(time.process_time())

    config = library.DPOConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", optim="sgd",
        max_steps=options.updates + _SKIPPED, per_device_train_batch_size=options.batch, save_strategy="no",
        logging_steps=1000, disable_tqdm=True, max_length=None,
    )  # fmt: skip
    trainer = library.DPOTrainer(
        model(), model(), config, train_dataset=Dataset.from_list(pairs(options)),
        processing_class=tokenizer(options.vocabulary), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    tokens = options.updates * options.batch * 2 * (options.prompt + options.answer + 1)
    return {"speed": tokens / (moments[1] - moments[0]), "bytes": memory.highest()}


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The best figures of each contender."""
    found: dict[str, dict[str, float]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sizes = [f"--{key}={getattr(options, key)}" for key in _SIZES]
    for _ in range(options.rounds):
        for name in LABELS:
            command = [sys.executable, __file__, f"--contender={name}", *sizes]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            now = json.loads(done.stdout.splitlines()[-1])
            before = found.get(name, now)
            found[name] = {
                "speed": max(now["speed"], before["speed"]), "bytes": min(now["bytes"], before["bytes"])
            }  # fmt: skip
    return found


def render(figures: dict[str, Any]) -> str:
    found = figures["contenders"]
    base = found["trl"]
    rows = [
        [
            LABELS[name], f"{it['speed']:.0f}", f"{it['speed'] / base['speed']:.2f}", f"{it['bytes'] / 1e6:.0f}",
            f"{it['bytes'] / base['bytes']:.2f}",
        ]
        for name, it in found.items()
    ]  # fmt: skip
    head = ["trainer", "tokens/s", "ratio", "peak of an update, MB", "ratio"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


_SIZES = {"vocabulary": 128_000, "hidden": 256, "prompt": 128, "answer": 64, "batch": 4, "updates": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contender(options.contender, options)))
        return
    figures = {**facts((*PACKAGES, "trl")), "contenders": run(options)}
    report("preferences", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
