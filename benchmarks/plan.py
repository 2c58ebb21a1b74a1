"""What `windlass plan` predicts of the memory of a run, against the memory that the run takes.

Each configuration is trained for a few updates in a process of its own, which first trains a tiny model, so that
libraries and kernels are loaded. Measured is how far the resident memory grows from before the model is built to its
peak in `train()`. Predicted is the peak of `forecast.tracing.trace_of`, of the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

# From <malloc.h>. glibc keeps freed blocks for later, larger ones too once such were freed; with a fixed threshold it
# gives blocks of that size back to the system.
_M_MMAP_THRESHOLD = -3


def _llama(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"kind": "llama", "hidden": hidden, "layers": layers, **more}


# What differs from: vocabulary 8192, batch 4 of length 256, AdamW, fp32, one micro-batch an update, lean loss.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama 7M": _llama(256, 4),
    "llama 7M, batch 16": _llama(256, 4, batch=16),
    "llama 7M, length 1024": _llama(256, 4, length=1024),
    "llama 7M, own logits": _llama(256, 4, batch=8, lean=False),
    "llama 7M, vocabulary 64k": _llama(256, 4, vocabulary=65536),
    "llama 7M, vocabulary 64k, own logits": _llama(256, 4, vocabulary=65536, lean=False),
    "llama 25M": _llama(512, 5),
    "llama 25M, batch 16": _llama(512, 5, batch=16),
    "llama 25M, recomputed": _llama(512, 5, batch=16, recompute=True),
    "llama 25M, accumulation 4": _llama(512, 5, accumulation=4),
    "llama 25M, SGD": _llama(512, 5, optim="sgd"),
    "llama 25M, Adafactor": _llama(512, 5, optim="adafactor"),
    "llama 25M, Lion": _llama(512, 5, optim="lion_32bit"),
    "llama 25M, bf16": _llama(512, 5, batch=8, bf16=True),
    "llama 25M, LoRA": _llama(512, 5, batch=8, lora=8),
    "llama 25M, LoRA, recomputed": _llama(512, 5, batch=16, lora=8, recompute=True),
    "llama 70M": _llama(768, 7, batch=2),
    "llama 70M, batch 8": _llama(768, 7, batch=8),
    "llama 70M, accumulation 2, recomputed": _llama(768, 7, batch=8, accumulation=2, recompute=True),
    "llama 70M, LOMO": _llama(768, 7, batch=2, optim="lomo"),
    "llama 150M": _llama(1024, 9, batch=2),
    "llama 150M, LoRA": _llama(1024, 9, batch=2, lora=16),
    "gpt2 10M": {"kind": "gpt2", "hidden": 256, "layers": 8, "batch": 8},
    "gpt2 40M": {"kind": "gpt2", "hidden": 512, "layers": 10, "batch": 4},
    "gpt2 40M, recomputed": {"kind": "gpt2", "hidden": 512, "layers": 10, "batch": 16, "recompute": True},
    "qwen3 30M": {"kind": "qwen3", "hidden": 512, "layers": 6, "batch": 8},
    "qwen3 30M, length 1024": {"kind": "qwen3", "hidden": 512, "layers": 6, "batch": 1, "length": 1024},
    "bert 15M": {"kind": "bert", "hidden": 384, "layers": 6, "batch": 16},
    "bert 15M, length 512": {"kind": "bert", "hidden": 384, "layers": 6, "batch": 8, "length": 512},
    "bert 90M": {"kind": "bert", "hidden": 768, "layers": 11, "batch": 4},
}


def build(given: dict[str, Any], folder: str) -> Any:
    """The Trainer of a configuration."""
    import torch

    from windlass import Trainer, TrainingArguments

    vocabulary, length = given.get("vocabulary", 8192), given.get("length", 256)
    batch = given.get("batch", 4)
    model = _model(given, vocabulary, length)
    if rank := given.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    ids = torch.randint(vocabulary, (batch * given.get("accumulation", 1) * 4, length))
    args = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=given.get("accumulation", 1),
        optim=given.get("optim", "adamw_torch"),
        learning_rate=1e-4,
        bf16=given.get("bf16", False),
        activation_checkpointing=given.get("recompute", False),
        lean_loss=given.get("lean", True),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
    )
    return Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])


def _model(given: dict[str, Any], vocabulary: int, length: int) -> Any:
    import transformers

    hidden, layers = given["hidden"], given["layers"]
    heads, sizes = max(hidden // 64, 2), {"vocab_size": vocabulary, "hidden_size": hidden}
    common = {
        **sizes,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
    }
    kind = given["kind"]
    if kind == "gpt2":
        sizes = {"vocab_size": vocabulary, "n_embd": hidden, "n_layer": layers, "n_head": heads}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=1024))
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**common, intermediate_size=4 * hidden))
    classes = {"llama": "Llama", "qwen3": "Qwen3"}
    more = {"head_dim": 64} if kind == "qwen3" else {}
    config = getattr(transformers, f"{classes[kind]}Config")(
        **common,
        **more,
        intermediate_size=3 * hidden,
        num_key_value_heads=max(heads // 2, 1),
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{classes[kind]}ForCausalLM")(config)


def measure(given: dict[str, Any], gives_back: bool) -> int:
    """Bytes by which the resident memory of this process grows from before the model to its peak. `gives_back`: the
    allocator returns all that is freed to the system.
    """
    import ctypes
    import gc

    libc = ctypes.CDLL(None)
    if gives_back:
        libc.mallopt(_M_MMAP_THRESHOLD, 2**17)
    small = {**given, "hidden": 64, "layers": 2, "vocabulary": 512, "batch": 2, "length": 32}
    with tempfile.TemporaryDirectory() as folder:
        build(small, folder).train()
        gc.collect()
        libc.malloc_trim(0)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        build(given, folder).train()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def predict(given: dict[str, Any]) -> dict[str, Any]:
    """The predicted peak in bytes, and its moment."""
    from windlass.forecast.tracing import trace_of

    with tempfile.TemporaryDirectory() as folder:
        trace = trace_of(lambda: build(given, folder).train())
    moment, held = trace.peak
    return {
        "bytes": held.total,
        "moment": " ".join(part for part in moment if part),
        "parameters": trace.facts["parameters"],
    }


def run(names: list[str], found: dict[str, dict[str, Any]], keep: Callable[[], None]) -> None:
    """Add predicted and measured bytes of each configuration to `found`, each in a process of its own that is forked
    from this one. `keep` is called after each.
    """
    import torch
    from peft import LoraConfig  # noqa: F401 (imported once, before processes are forked)
    from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    from windlass import Trainer  # noqa: F401
    from windlass.forecast.child import Child

    torch.set_num_threads(1)
    for name in names:
        given = CONFIGURATIONS[name]
        it = Child(lambda given=given: predict(given)).result()  # type: ignore[misc]
        for key, gives_back in (("measured", True), ("default", False)):
            it[key] = Child(lambda given=given, back=gives_back: measure(given, back)).result()  # type: ignore[misc]
        found[name] = it
        keep()
        sizes = [it[key] / 2**20 for key in ("bytes", "measured", "default")]
        shown = "".join(f"{size:9.1f}" for size in sizes)
        print(
            f"{name:<40}{shown}{sizes[0] / sizes[1] - 1:+8.1%}  {it['moment']}", file=sys.stderr, flush=True
        )


def render(figures: dict[str, Any]) -> str:
    found = figures["configurations"]
    errors = sorted(abs(it["bytes"] / it["measured"] - 1) for it in found.values())
    rows = []
    for name, it in found.items():
        sizes = [f"{it[key] / 2**20:.0f}" for key in ("bytes", "measured", "default")]
        error = it["bytes"] / it["measured"] - 1
        rows.append([name, f"{it['parameters'] / 1e6:.1f}", *sizes[:2], f"{error:+.1%}", sizes[2]])
    within = sum(error <= 0.1 for error in errors)
    said = (
        f"Within 10 %: {within} of {len(errors)}. Median of the error {errors[len(errors) // 2]:.1%}, largest "
        f"{errors[-1]:.1%}."
    )
    head = [
        "configuration",
        "million parameters",
        "predicted, MiB",
        "measured, MiB",
        "error",
        "with glibc's default, MiB",
    ]
    return f"{table(head, rows)}\n\n{said}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="configurations, separated by semicolons")
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument(
        "--json", type=Path, help="the figures are kept in this file; those in it are not measured again"
    )
    options = parser.parse_args()
    names = options.only.split(";") if options.only else list(CONFIGURATIONS)
    measured: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.is_file():
        measured = json.loads(options.json.read_text("utf-8"))["configurations"]

    def figures() -> dict[str, Any]:
        return {
            **facts(),
            "configurations": {name: measured[name] for name in CONFIGURATIONS if name in measured},
        }

    def keep() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(figures(), indent=1) + "\n", "utf-8")

    run([name for name in names if name not in measured], measured, keep)
    report("plan", render(figures()), figures(), options.write, options.json)


if __name__ == "__main__":
    main()
