"""Memory and time of a training step of a language model with a large vocabulary, by how its loss is computed.

The trainers run whole updates; of these, forward and backward are measured, as of the losses alone.

One small Llama (a layer, tied embeddings) with `--vocabulary` classes is trained for a step on `--tokens` tokens. The
figure is the highest memory during forward and backward, above parameters, gradients and optimizer state. Contenders
run in fresh processes of one thread, and take turns for `--rounds` rounds; the smallest time of each counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

LABELS = {
    "transformers": "transformers, the model's own loss",
    "transformers-trainer": "transformers, a plain `Trainer`",
    "windlass-trainer": "windlass, a plain `Trainer`",
    "windlass": "windlass, `lean_causal_lm_loss`",
    "torch": "`torch.nn.functional.linear_cross_entropy`, chunked",
    "liger": "Liger, fused linear cross entropy",
    "cce": "cut cross entropy",
}
NEEDED = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}


def loss_function(name: str) -> Callable[[Any, Any], Any]:
    """How contender `name` computes the mean loss of a batch of token ids."""
    import torch
    from torch.nn import functional

    def hidden_and_targets(model: Any, ids: Any) -> tuple[Any, Any]:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()

    def transformers(model: Any, ids: Any) -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def windlass(model: Any, ids: Any) -> Any:
        from windlass.transforms.lean_loss import lean_causal_lm_loss

        return lean_causal_lm_loss(model, {"input_ids": ids, "labels": ids})[0]

    def chunked(model: Any, ids: Any) -> Any:
        hidden, targets = hidden_and_targets(model, ids)
        options = torch.nn.LinearCrossEntropyOptions()
        return functional.linear_cross_entropy(hidden, model.lm_head.weight, targets, options=options)

    def liger(model: Any, ids: Any) -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden, targets = hidden_and_targets(model, ids)
        return LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden, targets)

    def cce(model: Any, ids: Any) -> Any:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            *hidden_and_targets(model, ids)[:1], model.lm_head.weight, ids[:, 1:].flatten()
        )

    return {"transformers": transformers, "windlass": windlass, "torch": chunked, "liger": liger, "cce": cce}[
        name
    ]


class Memory:
    """The highest memory since `reset`, above what was in use then: of the device, or of the process."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._before = 0

    def reset(self) -> None:
        import torch

        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps is not in use
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        self._before = self._status("VmRSS")

    def highest(self) -> int:
        """Bytes."""
        import torch

        if self._cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._before
        return self._status("VmHWM") - self._before

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def contender(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One step in this process: bytes above the lasting ones, and the seconds of forward and backward."""
    model = make_model(options)
    lasting = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    measure = trainer_step if name.endswith("-trainer") else loss_step
    highest, seconds = measure(name, model, options)
    return {"bytes": highest - lasting, "seconds": seconds}


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(options.device)


def clock(device: str) -> float:
    """Seconds: of this process's processor time on a CPU, which other programs do not lengthen."""
    return time.perf_counter() if device == "cuda" else time.process_time()


def trainer_step(name: str, model: Any, options: argparse.Namespace) -> tuple[int, float]:
    """Highest bytes and least seconds of an update of a Trainer, up to the optimizer's step."""
    import torch

    if name == "windlass-trainer":
        from windlass import Trainer, TrainerCallback, TrainingArguments
    else:
        from transformers import (  # type: ignore[assignment]
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )
    memory = Memory(options.device)
    times: list[float] = []
    highest: list[int] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            memory.reset()
            times.append(clock(options.device))

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            highest.append(memory.highest())
            times[-1] = clock(options.device) - times[-1]

    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(options.vocabulary, (4, options.tokens))
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
        )
        Trainer(model, args, train_dataset=rows, callbacks=[Watch()]).train()  # type: ignore[arg-type]
    return highest[-1], min(times[1:])


def loss_step(name: str, model: Any, options: argparse.Namespace) -> tuple[int, float]:
    """Highest bytes and least seconds of forward and backward with a loss function."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_of, memory = loss_function(name), Memory(options.device)

    def step(tokens: int) -> float:
        ids = torch.randint(options.vocabulary, (1, tokens), device=options.device)
        begin = clock(options.device)
        loss = loss_of(model, ids)
        loss.backward()
        memory_after = memory.highest()
        seconds = clock(options.device) - begin
        optimizer.step()
        optimizer.zero_grad()
        step.bytes = memory_after  # type: ignore[attr-defined]
        return seconds

    step(16)
    times = []
    for _ in range(2):
        memory.reset()
        times.append(step(options.tokens))
    return step.bytes, min(times)  # type: ignore[attr-defined]


def run(options: argparse.Namespace) -> dict[str, dict[str, float] | None]:
    """The figures of each contender; None for what is not installed."""
    names = [name for name in options.only.split(",") if name not in NEEDED or options.device == "cuda"]
    found: dict[str, dict[str, float] | None] = {
        name: {} if name not in NEEDED or importlib.util.find_spec(NEEDED[name]) else None for name in names
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sizes = [f"--{key}={getattr(options, key)}" for key in ("vocabulary", "tokens", "hidden", "device")]
    for _ in range(options.rounds):
        for name, before in found.items():
            if before is None:
                continue
            command = [sys.executable, __file__, f"--contender={name}", *sizes]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            now = json.loads(done.stdout.splitlines()[-1])
            found[name] = {key: min(now[key], before.get(key, now[key])) for key in now}
    return found


def render(figures: dict[str, Any]) -> str:
    found = figures["contenders"]
    base, rows = found["transformers"], []
    for name, it in found.items():
        if it is None:
            rows.append([LABELS[name], "not installed", "", "", ""])
            continue
        rows.append(
            [
                LABELS[name],
                f"{it['bytes'] / 1e6:.0f}",
                f"{it['bytes'] / base['bytes']:.2f}",
                f"{it['seconds']:.2f}",
                f"{it['seconds'] / base['seconds']:.2f}",
            ]
        )
    head = ["loss", "peak above lasting memory, MB", "ratio", "forward and backward, s", "ratio"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", default=",".join(LABELS), help="contenders, comma-separated, transformers first"
    )
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contender(options.contender, options)))
        return
    figures = {**facts(), "contenders": run(options)}
    report("loss-memory", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
