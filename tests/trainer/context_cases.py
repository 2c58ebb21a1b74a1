"""Runs of small decoders in float64, the same on one process and on ranks that divide their sequences."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from windlass import ParallelismConfig, Trainer, TrainingArguments
from windlass.dist.sharded import whole

_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"attention_bias": False}),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 4}),
    "gemma3": ("Gemma3TextConfig", _SIZES
               | {"head_dim": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("GPT2Config", {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
                            "bos_token_id": 1, "eos_token_id": 2} | _DROPS),
}  # fmt: skip


def model(name: str) -> Any:
    torch.manual_seed(0)
    kind, options = MODELS[name]
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options))
    return made.to(torch.float64)


def samples(count: int = 36) -> list[dict[str, list[int]]]:
    """Ragged rows; each has ignored targets, and those of one micro-batch (of two rows) have nothing else."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        length = int(torch.randint(3, 15, (), generator=generator))
        ids = torch.randint(3, 23, (length,), generator=generator).tolist()
        ignored = length if index // 2 == 4 else length // 3
        found.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return found


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    columns = {name: [] for name in fills}
    for row in rows:
        missing = width - len(row["input_ids"])
        for name, fill in fills.items():
            columns[name].append([*row.get(name, [1] * len(row["input_ids"])), *[fill] * missing])
    return {name: torch.tensor(values) for name, values in columns.items()}


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """In float64, as no model of transformers computes its own."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits, targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Noted(Trainer):
    """Notes what is logged."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.__dict__.setdefault("noted", []).append(dict(logs))
        super().log(logs, start_time)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 3, "max_steps": 6, "max_grad_norm": 0.3, "learning_rate": 0.02,
        "weight_decay": 0.1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "save_strategy": "no", "train_sampling_strategy": "sequential", **changes,
    }  # fmt: skip


def train(name: str, folder: Path, *, own_loss: bool = False, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Train and evaluate; return what was logged, and the weights."""
    trainer = Noted(
        model(name),
        TrainingArguments(**arguments(folder, **changes)),
        data_collator=collate,
        train_dataset=samples(),
        eval_dataset=samples(7),
        compute_loss_func=None if own_loss else token_loss,
        compute_metrics=lambda found: {"sum": float(found.predictions[0, :2, :].sum() if not isinstance(found.predictions, tuple) else 0.0)},
    )
    result = trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    logged = [
        {key: value for key, value in one.items() if key in ("loss", "grad_norm", "eval_loss", "eval_sum")}
        for one in trainer.noted
    ]
    weights = {key: whole(value).detach().flatten().tolist() for key, value in trainer.model.state_dict().items()}
    return {
        "logged": [one for one in logged if one], "train_loss": result.training_loss, "weights": weights,
        "eval": [metrics["eval_loss"], metrics["eval_sum"]],
        "tokens": trainer.state.num_input_tokens_seen,
    }  # fmt: skip


def main() -> None:
    folder, names, parallel, changes = Path(sys.argv[1]), sys.argv[2].split(","), *map(json.loads, sys.argv[3:5])
    given = {"parallelism_config": ParallelismConfig(**parallel)} if parallel else {}
    found = {name: train(name, folder / "run" / name, **given, **changes) for name in names}
    rank = int(__import__("os").environ.get("RANK", "0"))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
