"""The support table: each name that users of `Trainer` know, and what Windlass does with it.

It is derived from the declarations of arguments, settings and old names, and from `enums.py`.
`python -m tests.docs.support_table > docs/support.md` writes the page.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.finetuning.own_fields import own_fields

from windlass.config import enums as rows
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.accepting import OLD_NAMES
from windlass.config.arguments import Helpers, TrainingArguments
from windlass.config.enums import OptimizerNames, SchedulerType
from windlass.config.parallel.keys import Key
from windlass.config.parallel.sources import OWN_VARIABLE, REFUSED
from windlass.config.parallel.table import FLAGS, KEYS, VARIABLES, spellings
from windlass.config.sections.setting import rules_of
from windlass.config.setters import Setters
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.seq2seq_arguments import GenerationSection
from windlass.finetuning.sft_config import SFTConfig

CONSTRUCTOR = """
model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func compute_metrics
callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics
"""
CONSTRUCTOR_MAPPED = {"tokenizer": "is now processing_class", "callback": "is used as callbacks"}

TUNER = """
model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks optimizers
optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config formatting_func
"""
DPO_TUNER = """
model ref_model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks optimizers
quantization_config peft_config
"""
REWARD_TUNER = """
model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks optimizers
optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config
"""
TUNER_MAPPED = {
    "compute_loss_func": "is used, with a warning and a second forward for the figures; override compute_loss instead",
    "tokenizer": "is now processing_class",
    "dataset_text_field": "is now a field of SFTConfig",
    "max_seq_length": "is now max_length of SFTConfig",
    "packing": "is now a field of SFTConfig",
}
TRL_NAMES = """
SFTTrainer SFTConfig DPOTrainer DPOConfig RewardTrainer RewardConfig KTOTrainer KTOConfig
ModelConfig ScriptArguments DatasetMixtureConfig TrlParser get_dataset get_peft_config
get_quantization_config get_kbit_device_map clone_chat_template get_training_chat_template apply_chat_template
maybe_apply_chat_template is_conversational is_conversational_from_value maybe_convert_to_chatml extract_prompt
maybe_extract_prompt unpair_preference_dataset maybe_unpair_preference_dataset pack_dataset supports_tool_calling
prepare_multimodal_messages
"""
TRL_MAPPED = {"trl sft": "is `windlass train` with a recipe; `windlass convert-config FILE` makes one"}
_NOT_TUNING = "is not built; `windlass run` runs scripts with TRL's own on this engine"
TRL_REFUSED = {
    **dict.fromkeys(
        ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer"),
        _NOT_TUNING,
    ),
    "add_response_schema": "is not built: answers are not parsed",
}

METHODS = """
train evaluate predict evaluation_loop prediction_step training_step compute_loss compute_loss_context_manager
autocast_smart_context_manager create_optimizer create_scheduler create_optimizer_and_scheduler
get_optimizer_cls_and_kwargs get_decay_parameter_names get_train_dataloader get_eval_dataloader get_test_dataloader
num_examples set_initial_training_values get_total_train_batch_size save_model save_state create_model_card push_to_hub
init_hf_repo end
save_metrics log log_metrics metrics_format store_flos floating_point_ops call_model_init add_callback pop_callback
remove_callback is_local_process_zero is_world_process_zero create_accelerator_and_postprocess
get_tp_size get_cp_size get_sp_size
get_learning_rates get_num_trainable_parameters get_optimizer_group hyperparameter_search
"""
METHODS_MAPPED = {
    "get_batch_samples": "an override is called with the micro-batches of each update, before its first forward; it "
    "returns all of them, and a count of its own is refused on several processes (losses.md)",
}

SEQ2SEQ = "evaluate predict prediction_step load_generation_config"

CALLBACKS = """
DefaultFlowCallback ProgressCallback PrinterCallback NotebookProgressCallback EarlyStoppingCallback TrainerCallback
"""
CALLBACKS_REFUSED = {
    "JITCheckpointCallback": "is not needed: each run saves and exits on the signals in preemption_signals",
}
COLLATORS = """
default_data_collator DefaultDataCollator DataCollatorWithPadding DataCollatorForTokenClassification
DataCollatorForMultipleChoice DataCollatorForSeq2Seq DataCollatorForLanguageModeling
DataCollatorForPermutationLanguageModeling DataCollatorWithFlattening
"""

ACCELERATOR = """
device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config
deepspeed_plugin deepspeed_plugins
fsdp_plugin rng_types log_with project_dir project_config gradient_accumulation_plugin
step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin parallelism_config
scheduler_unit
"""


SAFETENSORS = "safe_serialization=False is mapped to True, with one warning: pickle is never written"
MEMBERS = """
prepare prepare_model prepare_data_loader prepare_optimizer prepare_scheduler unwrap_model
context_parallel_rank tensor_parallel_rank pipeline_parallel_rank
accumulate no_sync trigger_sync_in_backward join_uneven_inputs backward lomo_backward
clip_grad_norm_ clip_grad_value_ unscale_gradients optimizer_step_was_skipped sync_gradients
gradient_accumulation_steps autocast profile
gather gather_for_metrics reduce pad_across_processes split_between_processes set_trigger check_trigger
wait_for_everyone main_process_first local_main_process_first print
on_main_process on_local_main_process on_last_process on_process on_local_process
init_trackers get_tracker log end_training
load_state register_for_checkpointing register_save_state_pre_hook register_load_state_pre_hook
get_state_dict skip_first_batches free_memory clear verify_device_map
deepspeed_plugin device distributed_type num_processes process_index local_process_index use_distributed multi_device
is_main_process is_local_main_process is_last_process mixed_precision is_fsdp2 is_composable_parallelism_enabled
parallelism_config torch_device_mesh data_parallel_rank data_parallel_shard_rank should_save_model
split_batches dispatch_batches non_blocking use_stateful_dataloader project_dir logging_dir save_iteration
"""

MEMBERS_MAPPED = {
    "even_batches": "has no effect: all processes get the same number of batches, and no sample is repeated",
    "use_seedable_sampler": "True shuffles in the order of accelerate's SeedableRandomSampler; the order of samples "
    "follows from a seed in any case",
    "save_state": SAFETENSORS,
    "save_model": SAFETENSORS,
    "save": "writes safetensors (a name in .safetensors) or JSON (.json); a file of another name, such as model.pt, is "
    "one of torch.save. It holds tensors and plain values; objects are refused by name",
    "fp8_backend": "is AO or NO: torchao is the only backend",
    "maybe_context_parallel": "does nothing: the forward of a prepared model divides sequences; buffers stay whole",
}

MEMBERS_REFUSED = {
    "deepspeed_ulysses_dl_adapter": "it is for DeepSpeed's sequence parallelism, which ZeRO does not need; prepare "
    "the loader",
}


@dataclass(frozen=True, slots=True)
class Support:
    """What happens to a name. A reason is the end of the sentence "NAME ...".

    Attributes:
        refused: why setting it to other than its default is an error; empty if it is not.
        mapped: its effect, if it is accepted but does not do what its name says.
        means: what the name is, for tables that show it.
    """

    refused: str = ""
    mapped: str = ""
    means: str = ""

    @property
    def status(self) -> str:
        return "refused" if self.refused else "mapped" if self.mapped else "honoured"

    @property
    def note(self) -> str:
        return self.refused or self.mapped


Table = dict[str, Support]


def _table(honoured: Iterable[str], mapped: Mapping[str, str] = {}, refused: Mapping[str, str] = {}) -> Table:
    return {
        **{name: Support() for name in honoured},
        **{name: Support(mapped=note) for name, note in mapped.items()},
        **{name: Support(note) for name, note in refused.items()},
    }


def _declared(cls: Any) -> Table:
    """The fields of a class that `setting` declared."""
    means = {field.name: field.metadata["help"] for field in dataclasses.fields(cls)}
    return {name: Support(rules.refused, rules.mapped, means[name]) for name, rules in rules_of(cls).items()}


def _old_names() -> Table:
    notes = {name: old.note or f"is now {old.new}" for name, old in OLD_NAMES.items()}
    return {
        name: Support(note) if OLD_NAMES[name].refused else Support(mapped=note)
        for name, note in notes.items()
    }


def _added(config: type) -> Table:
    """The fields that a configuration of fine-tuning adds, or declares with another default."""
    names = own_fields(config)
    return {name: row for name, row in _declared(config).items() if name in names}


def _helpers(*mixins: type) -> Table:
    return _table(name for cls in mixins for name in vars(cls) if not name.startswith("_"))


def _optimizers() -> Table:
    known = {**dict.fromkeys(map(str, OptimizerNames), ""), **rows.UNBUILT_OPTIMIZERS}
    return {name: Support(reason) for name, reason in known.items()}


def _flags() -> Table:
    """The flags of `windlass launch`, which are those of `accelerate launch` and some of its own."""
    table = _table(f"--{word}" for word in ("config_file", "module", "no_python", "print"))
    for word, key in FLAGS.items():
        table[f"--{word}"] = _of_setting(key, f"--{word}", f"--{key.flags[0]}")
    return table


def _variables() -> Table:
    """The environment variables that launchers set."""
    table = {name: _of_setting(key, name, key.variables[0]) for name, key in VARIABLES.items()}
    return {OWN_VARIABLE: Support(), **table, **{name: Support(key.refused) for name, key in REFUSED.items()}}


def _of_setting(key: Key, spelling: str, first: str) -> Support:
    return Support(key.refused, key.idle or ("" if spelling == first else f"is another name of {first}"))


SECTIONS: dict[str, Table] = {
    "TrainingArguments": _declared(TrainingArguments),
    "Seq2SeqTrainingArguments": _declared(GenerationSection),
    "Renamed and removed arguments": _old_names(),
    "TrainingArguments helpers": _helpers(Helpers, Setters),
    "SFTConfig": {
        **_added(SFTConfig),
        **{old: Support(mapped=f"is now {new}") for old, new in SFTConfig.EARLIER_NAMES.items()},
    },
    "DPOConfig": _added(DPOConfig),
    "RewardConfig": _added(RewardConfig),
    "KTOConfig": _added(KTOConfig),
    "accelerator_config": _declared(AcceleratorConfig),
    "optim": _optimizers(),
    "lr_scheduler_type": _table(member.value for member in SchedulerType),
    "report_to": _table((*rows.TRACKERS, "all"), {}, rows.UNBUILT_TRACKERS),
    "Trainer constructor": _table(CONSTRUCTOR.split(), CONSTRUCTOR_MAPPED),
    "SFTTrainer constructor": _table(TUNER.split(), TUNER_MAPPED),
    "DPOTrainer constructor": _table(DPO_TUNER.split()),
    "KTOTrainer constructor": _table(DPO_TUNER.split()),
    "RewardTrainer constructor": _table(REWARD_TUNER.split()),
    "Names of TRL": _table(TRL_NAMES.split(), TRL_MAPPED, TRL_REFUSED),
    "Trainer methods": _table(METHODS.split(), METHODS_MAPPED),
    "Seq2SeqTrainer": _table(SEQ2SEQ.split()),
    "Callbacks": _table(CALLBACKS.split(), {}, CALLBACKS_REFUSED),
    "Data collators": _table(COLLATORS.split()),
    "Accelerator arguments": _table(ACCELERATOR.split(), {}, rows.ACCELERATOR_REFUSED),
    "Accelerator methods and properties": _table(MEMBERS.split(), MEMBERS_MAPPED, MEMBERS_REFUSED),
    "windlass launch": _flags(),
    "Environment variables": _variables(),
}


def markdown() -> str:
    """The page `docs/support.md`."""
    lines = [
        "# What Windlass does with each name",
        "",
        "Generated by `python -m tests.docs.support_table > docs/support.md`; a test compares the page with the code.",
        "",
        "*honoured*: does what its name says. *mapped*: accepted with the effect in the note. *refused*: setting it to",
        "other than its default raises an error with the reason, before anything starts.",
    ]
    for title, table in SECTIONS.items():
        counts = ", ".join(
            f"{sum(r.status == s for r in table.values())} {s}" for s in ("honoured", "mapped", "refused")
        )
        lines += ["", f"## {title}", "", f"{counts}.", "", *_rows(table)]
    return "\n".join([*lines, *_settings()]) + "\n"


def _rows(table: dict[str, Support]) -> Iterator[str]:
    means = any(row.means for row in table.values())
    yield "| name | status | note |" + (" means |" if means else "")
    yield "|---|---|---|" + ("---|" if means else "")
    for name, row in table.items():
        cells = (f"`{name}`", row.status, row.note, *((row.means,) if means else ()))
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _settings() -> Iterator[str]:
    """The lines of the table of settings: meaning, default, and the spelling in each place."""
    places = ("flag", "file", "variable", "arguments", "recipe")
    yield from ("", "## Settings of how training is spread and launched", "")
    yield "`windlass explain NAME` shows where the value of a setting comes from."
    yield from (
        "",
        f"| setting | means | default | {' | '.join(places)} |",
        "|---|---|---|---|---|---|---|---|",
    )
    for key in KEYS.values():
        if not key.refused and not key.idle:
            said = dict(spellings(key))
            default = json.dumps(list(key.default) if isinstance(key.default, tuple) else key.default)
            cells = [f"`{said[place]}`" if place in said else "" for place in places]
            yield f"| `{key.name}` | {key.doc} | `{default}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown(), end="")
