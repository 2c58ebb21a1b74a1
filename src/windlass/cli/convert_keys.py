"""The keys of TRL's, Axolotl's and LLaMA-Factory's configurations, and the keys of a recipe that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.core.errors import ConfigError, Problem

Pairs = Iterator[tuple[str, Any]]
Rule = str | Callable[[Any], Pairs]

TRL, AXOLOTL, FACTORY = "TRL", "Axolotl", "LLaMA-Factory"
# Keys that only one of the programs has.
_SIGNS = {
    AXOLOTL: ("base_model", "sequence_len", "micro_batch_size", "val_set_size"),
    FACTORY: ("stage", "finetuning_type", "cutoff_len", "lora_rank", "dataset_dir"),
    TRL: ("model_name_or_path", "dataset_name", "use_peft", "lora_target_modules", "max_length"),
}


def source_of(values: Mapping[str, Any]) -> str:
    """Return the program that a configuration is of, by its keys."""
    for source, signs in _SIGNS.items():
        if any(sign in values for sign in signs):
            return source
    signs_of = "; ".join(f"{source}: {', '.join(signs)}" for source, signs in _SIGNS.items())
    fix = f"is of none of the known programs, which have keys such as {signs_of}"
    raise ConfigError(Problem("FILE", sorted(values)[:8], fix))


def other_training(source: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that request another kind of training than supervised fine-tuning, and what to do."""
    fix = "is another kind of training than supervised fine-tuning, which is all that is converted"
    if source == FACTORY and values.get("stage", "sft") != "sft":
        yield "stage", fix
    if source == AXOLOTL and values.get("rl"):
        yield "rl", fix


# --- rules that several programs share --------------------------------------------------------------------------------


def _data(name: Any) -> Pairs:
    """A file or folder of this machine, else a dataset of the hub."""
    if not isinstance(name, str):
        raise ValueError("a recipe reads one source; name its path")
    yield "data.train", name
    if not Path(name).suffix and not Path(name).exists():
        yield "data.format", "hub"


def _listed_data(name: Any) -> Pairs:
    """A file, not the name of a dataset in LLaMA-Factory's list of datasets."""
    if not isinstance(name, str) or not (Path(name).suffix or Path(name).exists()):
        raise ValueError(
            "is a name in dataset_info.json, which is not looked up; set data.train to its file or hub name, or "
            "data.mixture to several files"
        )
    yield "data.train", name


def _special_tokens(value: Any) -> Pairs:
    """The two tokens that a recipe sets."""
    tokens = dict(value) if isinstance(value, Mapping) else {"special_tokens": value}
    for name in ("eos_token", "pad_token"):
        if name in tokens:
            yield f"training.{name}", tokens.pop(name)
    if tokens:
        raise ValueError(f"of {', '.join(tokens)}: tokens of the tokenizer are set in its folder")


def _fraction(value: Any) -> Pairs:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("a recipe holds out a share of the data: data.eval_fraction below 1")
    yield "data.eval_fraction", value


def _targets(value: Any) -> Pairs:
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else list(value)
    yield "adapter.target_modules", "all-linear" if words in (["all"], ["all-linear"]) else words


def _dtype(value: Any) -> Pairs:
    if value not in ("float32", "bfloat16", "float16"):
        raise ValueError("a recipe names float32, bfloat16 or float16")
    yield "model.dtype", value


def _attention(value: Any) -> Pairs:
    yield "training.model_init_kwargs.attn_implementation", value


def _revision(value: Any) -> Pairs:
    if value != "main":
        yield "training.model_init_kwargs.revision", value


def _when(wanted: Any, *pairs: tuple[str, Any]) -> Callable[[Any], Pairs]:
    """A rule that sets `pairs` if the value equals `wanted`, and nothing else."""
    return lambda value: iter(pairs if value == wanted else ())


_LORA: dict[str, Rule] = {
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_alpha": "adapter.lora_alpha",
    "lora_dropout": "adapter.lora_dropout",
    "lora_target_modules": _targets,
    "lora_target": _targets,
    "lora_target_parameters": "adapter.target_parameters",
    "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": lambda value: iter(
        [("adapter.modules_to_save", value.split(",") if isinstance(value, str) else value)]
    ),
    "use_dora": "adapter.use_dora",
    "use_rslora": "adapter.use_rslora",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
    "load_in_4bit": _when(True, ("quantization", "nf4")),
    "load_in_8bit": _when(True, ("quantization", "int8")),
}

_BY_LENGTH = _when(True, ("training.train_sampling_strategy", "group_by_length"))
_TRL: dict[str, Rule] = {
    **_LORA,
    "warmup_ratio": "training.warmup_steps",
    "group_by_length": _BY_LENGTH,
    "model_name_or_path": "model.name",
    "model_revision": _revision,
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "attn_implementation": _attention,
    "dataset_name": _data,
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "max_seq_length": "training.max_length",
}


def _axolotl_data(value: Any) -> Pairs:
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, Mapping) or "path" not in first:
        raise ValueError("names no path")
    files = first.get("data_files")
    yield from _data(files if isinstance(files, str) else first["path"])
    for name, dotted in (("name", "data.subset"), ("split", "data.split")):
        if first.get(name):
            yield dotted, first[name]
    if first.get("field"):
        yield "data.text_column", first["field"]


def _axolotl_eval(value: Any) -> Pairs:
    found = dict(_axolotl_data(value))
    if (isinstance(value, list) and len(value) > 1) or found.get("data.format") == "hub":
        raise ValueError("a recipe evaluates on one file: set data.eval to it, or data.eval_split")
    yield "data.eval", found["data.train"]


_AXOLOTL: dict[str, Rule] = {
    **_LORA,
    "base_model": "model.name",
    "tokenizer_config": "tokenizer.name",
    "datasets": _axolotl_data,
    "test_datasets": _axolotl_eval,
    "special_tokens": _special_tokens,
    "group_by_length": _BY_LENGTH,
    "train_on_inputs": _when(True, ("training.completion_only_loss", False)),
    "val_set_size": _fraction,
    "sequence_len": "training.max_length",
    "sample_packing": "training.packing",
    "eval_sample_packing": "training.eval_packing",
    "micro_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "num_epochs": "training.num_train_epochs",
    "optimizer": lambda value: iter(
        [("training.optim", {"adamw_torch_8bit": "adamw_8bit"}.get(value, value))]
    ),
    "lr_scheduler": "training.lr_scheduler_type",
    "warmup_ratio": "training.warmup_steps",
    "bf16": lambda value: iter([("training.bf16", value in (True, "auto", "full"))]),
    "bfloat16": "training.bf16",
    "flash_attention": _when(True, ("training.model_init_kwargs.attn_implementation", "flash_attention_2")),
    "sdp_attention": _when(True, ("training.model_init_kwargs.attn_implementation", "sdpa")),
    "lora_target_linear": _when(True, ("adapter.target_modules", "all-linear")),
    "dataset_processes": "training.dataset_num_proc",
}

_FACTORY: dict[str, Rule] = {
    **_LORA,
    "model_name_or_path": "model.name",
    "model_revision": _revision,
    "dataset": _listed_data,
    "eval_dataset": lambda value: (
        (name.replace("train", "eval"), path) for name, path in _listed_data(value)
    ),
    "group_by_length": _BY_LENGTH,
    "max_samples": "data.max_samples",
    "val_size": _fraction,
    "cutoff_len": "training.max_length",
    "neat_packing": "training.packing",
    "preprocessing_num_workers": "training.dataset_num_proc",
    "warmup_ratio": "training.warmup_steps",
    "flash_attn": lambda value: (
        _attention({"fa2": "flash_attention_2"}.get(value, value)) if value != "auto" else iter(())
    ),
    "quantization_bit": lambda value: (
        iter([("quantization", {4: "nf4", 8: "int8"}[value])]) if value in (4, 8) else _unknown_width(value)
    ),
    "train_on_prompt": _when(True, ("training.completion_only_loss", False)),
}


def _unknown_width(value: Any) -> Pairs:
    raise ValueError("bases of 4 or 8 bits are built")


TABLES: dict[str, dict[str, Rule]] = {TRL: _TRL, AXOLOTL: _AXOLOTL, FACTORY: _FACTORY}
# Keys that request what a recipe does anyway.
MEANINGLESS: dict[str, tuple[str, ...]] = {
    TRL: ("use_peft", "bnb_4bit_quant_type", "dataset_streaming", "do_train", "lora_task_type", "overwrite_output_dir"),
    AXOLOTL: ("adapter", "strict", "model_type", "tokenizer_type", "dataset_prepared_path", "pad_to_sequence_len",
              "is_llama_derived_model", "is_mistral_derived_model", "evals_per_epoch", "saves_per_epoch"),
    FACTORY: ("stage", "do_train", "finetuning_type", "overwrite_cache", "overwrite_output_dir", "quantization_type",
              "quantization_method", "plot_loss"),
}  # fmt: skip
REASONS = {
    "template": "the chat template of the tokenizer is used; set training.chat_template_path for another one",
    "chat_template": "the chat template of the tokenizer is used; set training.chat_template_path for another one",
    "datasets": "a recipe reads one source, or several files: set data.train or data.mixture",
    "wandb_project": "set training.report_to=wandb and WANDB_PROJECT",
    "wandb_name": "set training.run_name",
    "deepspeed": "set parallel.strategy=deepspeed and parallel.deepspeed.config to its file, or parallel.strategy=fsdp",
    "unfrozen_parameters": "a recipe trains all weights or an adapter",
    "dataset_dir": "data.train is a path; the name of a dataset in dataset_info.json is not looked up",
}


def settle(
    source: str, values: Mapping[str, Any], put: Callable[[str, Any], None], lose: Callable[[str, str], None]
) -> None:
    """Set what follows from several keys: whether there is an adapter, its base, and what the loss is over."""
    kind = {AXOLOTL: "adapter", FACTORY: "finetuning_type"}.get(source)
    adapts = bool(values.get("use_peft")) if kind is None else str(values.get(kind, "")) in ("lora", "qlora")
    if kind is not None and values.get(kind) not in (None, "", "full", "lora", "qlora"):
        lose(kind, "is not a kind of adapter that a recipe has; the adapter is a LoRA or none")
    if adapts:
        put("adapter.task_type", "CAUSAL_LM")
    if source == AXOLOTL:
        _settle_axolotl(values, put, lose)
    if source == FACTORY and not values.get("train_on_prompt"):
        put("training.assistant_only_loss", True)  # of each conversation, as its templates do


def _settle_axolotl(
    values: Mapping[str, Any], put: Callable[[str, Any], None], lose: Callable[[str, str], None]
) -> None:
    sources = values.get("datasets") or []
    if isinstance(sources, list) and len(sources) > 1:
        lose("datasets", f"a recipe reads one source; the other {len(sources) - 1} are left out")
    kinds = [str(item.get("type", "")) for item in sources if isinstance(item, Mapping)]
    if any("chat_template" in kind or "sharegpt" in kind for kind in kinds) and not values.get(
        "train_on_inputs"
    ):
        put("training.assistant_only_loss", True)
    for what in ("eval", "save"):
        count = values.get(f"{what}s_per_epoch")
        if values.get(f"{what}_steps"):
            put(f"training.{what}_strategy", "steps")
        elif count:
            _settle_times(what, count, values, put, lose)


def _settle_times(
    what: str,
    count: Any,
    values: Mapping[str, Any],
    put: Callable[[str, Any], None],
    lose: Callable[[str, str], None],
) -> None:
    """So many times in each epoch: at its end, or each such share of all updates."""
    times = count * values.get("num_epochs", 1)
    put(f"training.{what}_strategy", "epoch")
    if count == 1:
        return
    if values.get("max_steps") or times <= 1:
        lose(
            f"{what}s_per_epoch",
            f"happens at the end of each epoch; set training.{what}_steps for other times",
        )
        return
    put(f"training.{what}_strategy", "steps")
    put(f"training.{what}_steps", round(1 / times, 6))
