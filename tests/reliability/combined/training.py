"""Carries out a recipe on one rank: with a Trainer, with an SFTTrainer; `loop.py` does it with a loop."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.finetuning.vision_families import family
from tests.reliability.combined import models
from tests.reliability.combined.losses import evaluated_by_hand, loss_function, overriding
from tests.reliability.combined.recipe import GLOBAL_BATCH, Outcome, Recipe
from tests.reliability.combined.watch import Instants, Watch
from tests.trainer.resume_cases import rows
from torch import Tensor, nn

from windlass import (
    DPOConfig,
    DPOTrainer,
    EMACallback,
    SFTConfig,
    SFTTrainer,
    SWACallback,
    Trainer,
    TrainingArguments,
)
from windlass.core.module_state import state_of
from windlass.core.types import State
from windlass.dist.sharded import local

DECAY = 0.8  # of averaged weights
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = {
    "max_steps": 8,
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 3,
    "per_device_eval_batch_size": 4,
    "disable_tqdm": True,
    "log_level": "error",
    "report_to": "none",
    "ddp_timeout": 60,
}
# Defaults of SFTConfig that are features here.
_SFT = {"gradient_checkpointing": None, "bf16": False, "max_length": 24}


def settings(recipe: Recipe) -> dict[str, Any]:
    """All arguments of a recipe."""
    chosen = {
        **_STEPS,
        "use_cpu": recipe.on_processor,
        "full_determinism": not recipe.on_processor,
        "per_device_train_batch_size": GLOBAL_BATCH // recipe.data_ranks,
        "gradient_accumulation_steps": recipe.accumulation,
        **(_SFT if recipe.kind in ("sft", "dpo") else {}),
        **recipe.arguments,
    }
    if recipe.axes:
        chosen["parallelism_config"] = dict(recipe.axes)
    if recipe.strategy == "fsdp2":
        chosen = {"fsdp": "full_shard", **chosen}
    if recipe.strategy.startswith("zero"):
        stage = {"stage": int(recipe.strategy[-1])}
        parts = {"zero_optimization": stage, "zero_allow_untested_optimizer": True}
        chosen["deepspeed"] = parts
    return chosen


def bare(recipe: Recipe) -> nn.Module:
    """The model of a recipe without an adapter; the same each time."""
    if recipe.images:
        seeing: nn.Module = family("llava", 7)[0]
        for part in seeing.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = recipe.dropout
        return seeing.to(DTYPES[recipe.dtype])
    torch.manual_seed(7)
    kind: Any = models.Plain if recipe.model == "plain" else models.llama
    made: nn.Module = kind(recipe.dropout, recipe.experts)
    return made.to(DTYPES[recipe.dtype])


def adapter_config(recipe: Recipe) -> Any:
    import peft

    layers = ["up", "down"] if recipe.model == "plain" else ["q_proj", "v_proj", "down_proj"]
    task = {"task_type": "CAUSAL_LM"} if recipe.model == "llama" else {}
    match recipe.adapter:
        case "ia3":
            return peft.IA3Config(target_modules=layers, feedforward_modules=layers[-1:], **task)
        case "prompt":
            return peft.PromptTuningConfig(num_virtual_tokens=3, **task)
        case "prefix":
            return peft.PrefixTuningConfig(num_virtual_tokens=3, **task)
        case "lora_and_head":
            head = "head" if recipe.model == "plain" else "lm_head"
            return peft.LoraConfig(r=2, target_modules=layers, modules_to_save=[head], **task)
    return peft.LoraConfig(r=2, target_modules=layers, use_dora=recipe.adapter == "dora", **task)


def model_of(recipe: Recipe) -> nn.Module:
    model = bare(recipe)
    if not recipe.adapter:
        return model
    import peft

    torch.manual_seed(8)
    return peft.get_peft_model(model, adapter_config(recipe), autocast_adapter_dtype=False)  # type: ignore[arg-type]


def data_of(recipe: Recipe) -> Any:
    match recipe.data:
        case "stream":
            return models.Stream(recipe.ragged)
        case "stateful_stream":
            return models.StatefulStream(recipe.ragged)
        case "datasets_rows" | "datasets_stream":
            return models.of_datasets(recipe.ragged, recipe.data == "datasets_stream")
    return models.training_rows(recipe.ragged)


def trainer_of(recipe: Recipe, folder: Path, watch: Watch) -> Trainer:
    callbacks: list[Any] = [watch]
    if recipe.kind == "dpo":
        return pair_trainer(recipe, folder, callbacks)
    if recipe.average:
        averages = {"ema": lambda: EMACallback(decay=DECAY), "swa": lambda: SWACallback(2, 1)}
        callbacks.insert(0, averages[recipe.average]())
    common: dict[str, Any] = {
        "train_dataset": data_of(recipe),
        "eval_dataset": models.evaluation_rows(recipe.ragged),
        "callbacks": callbacks,
        "compute_loss_func": loss_function(recipe),
    }
    if recipe.images:
        for name, made in (("train_dataset", models.training_rows), ("eval_dataset", models.evaluation_rows)):
            common[name] = models.conversations(made(recipe.ragged))
    if recipe.kind == "sft":
        trained, common["peft_config"] = bare(recipe), adapter_config(recipe) if recipe.adapter else None
        torch.manual_seed(8)
        sft = overriding(SFTTrainer, recipe)
        return sft(
            trained,
            SFTConfig(str(folder), **settings(recipe)),
            processing_class=family("llava")[1] if recipe.images else models.tokenizer(),
            **common,
        )  # type: ignore[no-any-return]
    return overriding(Trainer, recipe)(  # type: ignore[no-any-return]
        model_of(recipe),
        TrainingArguments(str(folder), **settings(recipe)),
        data_collator=models.pad,
        **common,
    )


def pair_trainer(recipe: Recipe, folder: Path, callbacks: list[Any]) -> Trainer:
    rows, evaluated = (
        models.pairs(made(recipe.ragged)) for made in (models.training_rows, models.evaluation_rows)
    )
    reference = bare(recipe)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    adapter = adapter_config(recipe) if recipe.adapter else None
    torch.manual_seed(8)
    return DPOTrainer(
        bare(recipe),
        None if recipe.adapter else reference,
        DPOConfig(str(folder), **settings(recipe)),
        train_dataset=rows,
        eval_dataset=evaluated,
        processing_class=models.tokenizer(),
        callbacks=callbacks,
        peft_config=adapter,
    )


def train(
    recipe: Recipe, folder: Path, instants: Instants, outcome: Outcome, resume: bool
) -> Callable[[], None]:
    """Train, fill `outcome`, and return what is left to do: looking at what was saved."""
    watch = Watch(instants, DECAY if recipe.average == "ema" else None)
    outcome.seen = watch.seen
    trainer = trainer_of(recipe, folder, watch)
    found = trainer.train(resume_from_checkpoint="auto" if resume else None)
    instants.stop()
    watch.seen["updates"] = found.global_step
    watch.seen["checkpoints"] = sorted(
        int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")
    )
    watch.end(trainer.model)
    assert trainer.optimizer is not None
    outcome.bits = [digest(trainer.model, trainer.optimizer)]
    outcome.rows = rows(folder)

    def look() -> None:
        outcome.evaluated = float(trainer.evaluate()["eval_loss"])
        trainer.save_model(str(folder / "final"))
        if os.environ.get("RANK", "0") == "0":
            outcome.reread = reread(recipe, folder / "final")

    return look


def reread(recipe: Recipe, folder: Path) -> float | None:
    """The evaluation loss by hand of a model that lies in a folder."""
    if recipe.by_hand is None:
        return None
    model = loaded(recipe, folder)
    half = recipe.arguments.get("bf16"), recipe.arguments.get("fp16")
    lower = torch.bfloat16 if half[0] else torch.float16
    with torch.autocast("cpu", lower) if any(half) else nullcontext():
        return evaluated_by_hand(recipe, model, models.evaluation_rows(recipe.ragged))


def loaded(recipe: Recipe, folder: Path) -> nn.Module:
    """As a script reads it that knows nothing of this library."""
    if recipe.adapter:
        import peft

        return peft.PeftModel.from_pretrained(bare(recipe), str(folder), autocast_adapter_dtype=False)  # type: ignore[arg-type]
    if recipe.model == "llama":
        from transformers import LlamaForCausalLM, MixtralForCausalLM
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # of the run that has ended: it would divide this model among ranks
        kind = MixtralForCausalLM if recipe.experts else LlamaForCausalLM
        return kind.from_pretrained(folder, dtype=DTYPES[recipe.dtype])
    model = bare(recipe)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def digest(model: nn.Module, optimizer: Any) -> str:
    """One hash over weights, buffers and the optimizer's state, as far as this rank holds them."""
    hashed = hashlib.sha256()
    for name, tensor in state_of(model).items():
        hashed.update(name.encode())
        _add(hashed, tensor)
    # ZeRO's third stage takes the parameters of all groups in a loop, and states are numbered by groups.
    numbered = any(group["params"] for group in optimizer.param_groups)
    _add(hashed, optimizer.state_dict()["state"] if numbered else list(optimizer.state.values()))
    return hashed.hexdigest()


def _add(hashed: Any, value: State | Any) -> None:
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            hashed.update(str(name).encode())
            _add(hashed, value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            _add(hashed, part)
    elif isinstance(value, Tensor):
        mine = local(value).detach()
        if hasattr(mine, "__tensor_flatten__"):
            _add(hashed, [getattr(mine, name) for name in mine.__tensor_flatten__()[0]])
        else:
            hashed.update(mine.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        hashed.update(repr(value).encode())
