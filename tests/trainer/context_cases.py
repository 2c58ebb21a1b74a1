"""Runs of small decoders in float64, the same on one process and on ranks that divide their sequences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.trainer.resume_cases import kill
from torch import Tensor, nn

from windlass import ParallelismConfig, Trainer, TrainerCallback, TrainingArguments
from windlass.cli.proving.proving_rank import double_precision
from windlass.dist.gang import leave
from windlass.dist.sharded import whole

_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"attention_bias": False}),
    "even": ("LlamaConfig", _SIZES | {"vocab_size": 24, "attention_bias": True}),
    "heads": ("LlamaConfig", _SIZES | {"num_key_value_heads": 4}),
    "tied": ("LlamaConfig", _SIZES | {"vocab_size": 24, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 4}),
    "qwen2": ("Qwen2Config", _SIZES | _WINDOWS | {"use_sliding_window": True}),
    "cohere2": ("Cohere2Config", _SIZES | _WINDOWS | {"head_dim": 4}),
    "olmo3": ("Olmo3Config", _SIZES | _WINDOWS),
    "smollm3": ("SmolLM3Config", _SIZES | {"no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma2Config", _SIZES | _WINDOWS | {"head_dim": 4, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", _SIZES | _WINDOWS | {"head_dim": 4}),
    "mixtral": ("MixtralConfig", _SIZES | _EXPERTS),
    "balanced": ("MixtralConfig", _SIZES | _EXPERTS
                 | {"output_router_logits": True, "router_aux_loss_coef": 5.0}),
    "qwen3_moe": ("Qwen3MoeConfig", _SIZES | {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
                                              "moe_intermediate_size": 16, "norm_topk_prob": True}),
    "gpt_oss": ("GptOssConfig", _SIZES | _EXPERTS | {"head_dim": 4, "sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2Config", _SIZES | _LATENT),
    "deepseek_v3": ("DeepseekV3Config", _SIZES | _LATENT),
    "gpt2": ("GPT2Config", {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
                            "bos_token_id": 1, "eos_token_id": 2} | _DROPS),
    "dropped gpt2": ("GPT2Config", {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
                                    "bos_token_id": 1, "eos_token_id": 2} | dict.fromkeys(_DROPS, 0.1)),
    "phi3": ("Phi3Config", _SIZES),
    "olmoe": ("OlmoeConfig", _SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "t5": ("T5Config", {"vocab_size": 23, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4,
                        "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
                        "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip


def deep(options: dict[str, Any]) -> dict[str, Any]:
    """The configuration with twice as many layers, of each kind."""
    doubled = ("num_hidden_layers", "n_layer", "num_layers", "layer_types", "no_rope_layers")
    return {key: value * 2 if key in doubled else value for key, value in options.items()}


def model(name: str) -> Any:
    torch.manual_seed(0)
    kind, options = MODELS[name.removeprefix("deep ")]
    if name.startswith("deep "):
        options = deep(options)
    config = getattr(transformers, kind)(**options)
    # Grouped products are not built in float64.
    kind_of_model = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind_of_model}")
    made = auto.from_config(config, experts_implementation="eager")
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
    columns: dict[str, list[list[int]]] = {name: [] for name in fills}
    for row in rows:
        missing = width - len(row["input_ids"])
        for name, fill in fills.items():
            columns[name].append([*row.get(name, [1] * len(row["input_ids"])), *[fill] * missing])
    return {name: torch.tensor(values) for name, values in columns.items()}


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """In float64, as no model of transformers computes its own."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, targets)
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class Noted(Trainer):
    """Notes what is logged."""

    noted: list[dict[str, float]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.noted = [*getattr(self, "noted", []), dict(logs)]
        super().log(logs, start_time)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**{
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 3, "max_steps": 6, "max_grad_norm": 0.3, "learning_rate": 0.02,
        "weight_decay": 0.1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "save_strategy": "no", "train_sampling_strategy": "sequential", "include_num_input_tokens_seen": "non_padding",
        **changes,
    })  # fmt: skip


def first_logits(found: Any) -> dict[str, float]:
    made = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    logits = next(each for each in made if getattr(each, "ndim", 0) == 3)
    return {"logits": float(logits[:, :3].sum())}


def killing(step: int, event: str) -> list[TrainerCallback]:
    """Kills the last rank at an event of update `step`; 0: none is killed."""
    return [kill(event, step, only_rank=int(os.environ.get("WORLD_SIZE", "1")) - 1)] if step else []


KEPT = (
    "loss", "grad_norm", "eval_loss", "eval_logits", "num_input_tokens_seen", "expert_load", "expert_load_max",
    "experts_unused", "aux_loss",
)  # fmt: skip


def train(
    name: str,
    folder: Path,
    *,
    own_loss: bool = False,
    resume: bool | str = False,
    killed_at: int = 0,
    killed_on: str = "on_step_end",
    trains: str = "",
    **changes: Any,
) -> dict[str, list[float]]:
    """Train and evaluate; return what was reported, and the weights. The last rank is killed at an event of update
    `killed_at`. Parameters with `trains` in their names are trained.
    """
    made = model(name)
    for path, parameter in made.named_parameters():
        parameter.requires_grad_(trains in path)
    trainer = Noted(
        made,
        arguments(folder, **changes),
        data_collator=collate,
        train_dataset=samples(),
        eval_dataset=samples(7),
        compute_loss_func=None if own_loss else token_loss,
        compute_metrics=first_logits,
        callbacks=killing(killed_at, killed_on),
    )
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    reported = [[one[key] for key in KEPT if key in one] for one in trainer.noted]
    weights = {key: whole(value).detach().flatten() for key, value in trainer.model.state_dict().items()}
    return {
        "reported": [value for one in reported for value in one] + [result.training_loss],
        "weights": torch.cat([weights[key] for key in sorted(weights)]).tolist(),
    }


def layout(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layout: sizes, and options beside them."""
    options = {"pp_schedule", "tp_sequence_parallel"} & given.keys()
    return {"parallelism_config": given if options else ParallelismConfig(**given)} if given else {}


def main(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    found = {}
    with double_precision():  # also of what models compute in single precision, whose rounding hides faults
        for case, (name, parallel, changes) in cases.items():
            found[case] = train(name, folder / case, **layout(parallel), **changes)
            leave()  # the next case may have another layout
    return found
