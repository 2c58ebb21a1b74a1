"""Run by `test_trl.py` in a process of its own: trl's trainers, as a script uses them, on tiny models and data."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "d", "e", "f", "g"]
PREFERENCES = {
    "prompt": ["a b", "c d", "e f"] * 8, "chosen": [" c d", " e", " g a"] * 8, "rejected": [" a", " f g", " b"] * 8
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def saved(cls: Any, **changes: Any) -> str:
    """The folder of a tiny model, from which trl loads a reference model too."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes, **changes
    )
    cls(config).save_pretrained(folder)
    return folder


# Written before there is a process group, in which the main process alone would write.
FOLDERS = {
    LlamaForCausalLM: saved(LlamaForCausalLM),
    LlamaForSequenceClassification: saved(LlamaForSequenceClassification, num_labels=1),
}


def model(cls: Any = LlamaForCausalLM) -> Any:
    return cls.from_pretrained(FOLDERS[cls])


def options(**changes: Any) -> dict[str, Any]:
    common = {
        "output_dir": tempfile.mkdtemp(), "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 2,
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_steps": 2,
        "learning_rate": 1e-2,
    }  # fmt: skip
    return {**common, **changes}


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def sft() -> Any:
    texts = Dataset.from_dict({"text": ["a b c d e", "b c d", "c d e f g a b"] * 8})
    return SFTTrainer(model(), SFTConfig(**options()), train_dataset=texts, processing_class=tokenizer())


def dpo() -> Any:
    pairs = Dataset.from_dict(PREFERENCES)
    return DPOTrainer(model(), args=DPOConfig(**options()), train_dataset=pairs, processing_class=tokenizer())


def dpo_sync() -> Any:
    """Its callback reads `AcceleratorState`; the reference model goes towards the trained one."""
    config = DPOConfig(**options(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5))
    pairs = Dataset.from_dict(PREFERENCES)
    return DPOTrainer(model(), model(), args=config, train_dataset=pairs, processing_class=tokenizer())


def dpo_metrics() -> Any:
    """Its `prediction_step` returns labels that are in no column of a batch."""
    pairs = Dataset.from_dict(PREFERENCES)
    config = DPOConfig(**options(eval_strategy="steps", eval_steps=2))
    return DPOTrainer(
        model(), args=config, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer(),
        compute_metrics=lambda found: {"rows": float(len(found.label_ids))},
    )  # fmt: skip


def reward() -> Any:
    pairs = Dataset.from_dict({name: PREFERENCES[name] for name in ("chosen", "rejected")})
    judge = model(LlamaForSequenceClassification)
    return RewardTrainer(judge, RewardConfig(**options()), train_dataset=pairs, processing_class=tokenizer())


class Judged(RewardTrainer):
    """Returns the two rewards of each pair, and labels that are in no column of a batch."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        rewards = torch.stack(outputs.logits.squeeze(-1).chunk(2), dim=1)
        return loss.detach(), rewards, torch.zeros(len(rewards), dtype=torch.int64)


def reward_metrics() -> Any:
    pairs = Dataset.from_dict({name: PREFERENCES[name] for name in ("chosen", "rejected")})
    config = RewardConfig(**options(eval_strategy="steps", eval_steps=2))
    return Judged(
        model(LlamaForSequenceClassification), config, train_dataset=pairs, eval_dataset=pairs,
        processing_class=tokenizer(), compute_metrics=lambda found: {"rows": float(len(found.label_ids))},
    )  # fmt: skip


def kto() -> Any:
    rows = {"prompt": ["a b", "c d"] * 8, "completion": [" c d", " f"] * 8, "label": [True, False] * 8}
    data = Dataset.from_dict(rows)
    return KTOTrainer(model(), args=KTOConfig(**options()), train_dataset=data, processing_class=tokenizer())


def _sampling(trainer: Any, config: Any, stream: bool = False) -> Any:
    args = config(**options(num_generations=2, max_completion_length=6, beta=0.04))
    prompts = Dataset.from_dict({"prompt": PREFERENCES["prompt"]})
    prompts = prompts.to_iterable_dataset() if stream else prompts
    return trainer(
        model(), reward_funcs=lengths, args=args, train_dataset=prompts, processing_class=tokenizer()
    )


def grpo() -> Any:
    return _sampling(GRPOTrainer, GRPOConfig)


def rloo() -> Any:
    return _sampling(RLOOTrainer, RLOOConfig)


def grpo_stream() -> Any:
    return _sampling(GRPOTrainer, GRPOConfig, stream=True)


TRAINERS: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (sft, dpo, reward, kto, grpo, rloo, dpo_sync, dpo_metrics, reward_metrics, grpo_stream)
}


def _moved(trainer: Any) -> bool | None:
    """Whether the reference model differs from the one that was loaded; None if there is none."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return None
    loaded = model().state_dict()
    now = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in reference.state_dict().items()}
    return any(not torch.equal(tensor, loaded[name.removeprefix("module.")]) for name, tensor in now.items())


def main(names: list[str]) -> None:
    for name in names:
        trainer = TRAINERS[name]()
        result = trainer.train()
        found = {
            "name": name,
            "engine": [cls.__module__.split(".")[0] for cls in type(trainer).__mro__],
            "steps": result.global_step,
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "processes": trainer.accelerator.num_processes,
            "evaluated": [row["eval_rows"] for row in trainer.state.log_history if "eval_rows" in row],
            "reference_moved": _moved(trainer),
        }
        if trainer.is_world_process_zero():
            print("RESULT", json.dumps(found), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
