"""Drawn arguments through the trainers of fine-tuning and through TRL's: the same rows, figures, weights and files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.finetuning import small
from tests.finetuning.preferences import moved, pairs, talks
from tests.trainer.test_best import memory
from tests.versions import with_pinned

import windlass

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|> {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %}{% else %}{{ message['content'] }} <eos>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON: dict[str, list[Any]] = {
    "gradient_checkpointing": [True, False],
    "pad_to_multiple_of": [None, 4],
    "max_grad_norm": [0.0, 0.1, 1.0],
    "weight_decay": [0.0, 0.1],
    "eval_strategy": ["no", "steps", "epoch"],
    "max_steps": [1, 3],
}
SFT: dict[str, list[Any]] = {
    **COMMON,
    "max_length": [None, 8, 16, 64],
    "truncation_mode": ["keep_start", "keep_end"],
    "packing": [False, False, True],
    "packing_strategy": ["bfd", "bfd_split", "wrapped"],
    "shuffle_dataset": [False, True],
    "completion_only_loss": [None, True, False],
    "assistant_only_loss": [False, True],
    "loss_type": ["nll", "dft"],
    "label_smoothing_factor": [0.0, 0.1],
    "eos_token": [None, "<|user|>"],
}
OF_DIFFERENCE = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop"]
OF_ANSWERS = ["nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "sft"]
REFERENCE: dict[str, list[Any]] = {
    "beta": [0.1, 1.0],
    "sync_ref_model": [False, True],
    "ref_model_sync_steps": [1, 2],
    "ref_model_mixup_alpha": [0.3, 1.0],
}
DPO: dict[str, list[Any]] = {
    **COMMON,
    **REFERENCE,
    "max_length": [None, 8, 64],
    "ld_alpha": [None, 0.4],
    "precompute_ref_log_probs": [False, True],
}
REWARD: dict[str, list[Any]] = {
    **COMMON,
    "max_length": [None, 64],
    "center_rewards_coefficient": [None, 0.1],
}
KTO: dict[str, list[Any]] = {
    **COMMON,
    **REFERENCE,
    "max_length": [None, 8, 64],
    "loss_type": ["kto", "apo_zero_unpaired"],
    "desirable_weight": [1.0, 0.5],
    "undesirable_weight": [1.0, 2.0],
}
# Each library's own times.
OWN = {"runtime", "second", "flos"}
# What of a log does not depend on how an update is split: TRL's other figures are means of the means of micro-batches.
OF_UPDATES = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "num_tokens",
    "train_loss",
}


def sizes(draw: st.DrawFn, **fixed: int) -> dict[str, Any]:
    found = {"per_device_train_batch_size": draw(st.sampled_from([2, 3, 4])), **fixed}
    return {"gradient_accumulation_steps": draw(st.sampled_from([1, 1, 2])), **found}


def chosen(draw: st.DrawFn, values: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: draw(st.sampled_from(options)) for name, options in values.items()}


def read(drawn: dict[str, Any]) -> dict[str, Any]:
    """Without the options of a reference that moves, which are refused beside one that stays."""
    moving = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    return {name: value for name, value in drawn.items() if drawn["sync_ref_model"] or name not in moving}


@st.composite
def sft_arguments(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    form = draw(st.sampled_from(["texts", "prompts", "chats"]))
    drawn = chosen(draw, SFT) | sizes(draw)
    if form != "prompts":
        del drawn["completion_only_loss"]
    if form != "chats":
        del drawn["assistant_only_loss"]
    if drawn["loss_type"] == "dft":
        del drawn["label_smoothing_factor"]
    if drawn["packing"]:  # an unknown number of rows, which they cut at the end
        drawn |= {"max_length": drawn["max_length"] or 16, "truncation_mode": "keep_start"}
        drawn |= {"gradient_accumulation_steps": 1}
    return form, drawn


@st.composite
def dpo_arguments(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    form = draw(st.sampled_from(["pairs", "talks", "implicit"]))
    drawn = chosen(draw, DPO) | sizes(draw)
    kinds = draw(st.sampled_from([OF_DIFFERENCE, OF_DIFFERENCE + OF_ANSWERS]))
    drawn["loss_type"] = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))
    drawn["loss_weights"] = draw(st.sampled_from([None, [0.5, 1.5][: len(drawn["loss_type"])]]))
    if kinds is OF_DIFFERENCE:
        drawn["use_weighting"] = "hinge" not in drawn["loss_type"] and draw(st.booleans())
        drawn["f_divergence_type"] = draw(
            st.sampled_from(["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
        )
    if {"robust", "aot", "aot_unpaired"} & set(drawn["loss_type"]):
        drawn["label_smoothing"] = draw(st.sampled_from([0.0, 0.1]))
    if "sft" in drawn["loss_type"]:  # theirs is a mean of the means of micro-batches
        drawn["gradient_accumulation_steps"] = 1
    drawn["sync_ref_model"] = drawn["sync_ref_model"] and not drawn["precompute_ref_log_probs"]
    return form, read(drawn)


@st.composite
def kto_arguments(draw: st.DrawFn) -> dict[str, Any]:
    drawn = chosen(draw, KTO) | sizes(draw)
    if drawn["loss_type"] == "apo_zero_unpaired" and not drawn["sync_ref_model"]:
        drawn["precompute_ref_log_probs"] = draw(st.booleans())
    return read(drawn)


def tokenizer() -> Any:
    made = small.tokenizer()
    made.chat_template = MARKED
    return made


def both(
    folder: Path, kind: str, model: Any, rows: list[dict[str, Any]], drawn: dict[str, Any], **given: Any
) -> tuple[Any, Any]:
    """Our trainer and theirs after training, on models and data of their own. `given`: functions that make the other
    arguments.
    """
    whole = drawn["per_device_train_batch_size"] * drawn["gradient_accumulation_steps"]
    fixed = {
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.1,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "eval_steps": 1, "save_strategy": "no", "seed": 1,
    }  # fmt: skip
    made = []
    for library in (windlass, trl):
        args = getattr(library, f"{kind}Config")(str(folder / library.__name__), **fixed, **drawn)
        trainer = getattr(library, f"{kind}Trainer")(
            model(), args=args, train_dataset=small.table(rows[: 2 * whole]),
            eval_dataset=small.table(rows[-min(args.per_device_eval_batch_size, 4) :]), processing_class=tokenizer(),
            **{name: make() for name, make in given.items()},
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        made.append(trainer)
    ours, theirs = made
    return ours, theirs


def log(trainer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name.rsplit("_", 1)[-1] not in OWN}
        for entry in trainer.state.log_history
    ]


def files(trainer: Any) -> set[str]:
    return {path.name for path in Path(trainer.args.output_dir).iterdir()}


def check(ours: Any, theirs: Any, columns: tuple[str, ...]) -> None:
    for name in ("train_dataset", "eval_dataset"):
        rows = [
            [{column: row[column] for column in columns if column in row} for row in getattr(trainer, name)]
            for trainer in (ours, theirs)
        ]
        assert rows[0] == rows[1], name
    *entries, last = zip(log(ours), log(theirs), strict=True)
    several = theirs.args.gradient_accumulation_steps > 1
    for mine, other in entries:
        assert mine.keys() == other.keys()
        names = OF_UPDATES & other.keys() if several and "loss" in other else other.keys()
        for name in names:
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    # Theirs lacks the figures since the last report after an evaluation.
    for name in OF_UPDATES & last[1].keys():
        assert last[0][name] == pytest.approx(last[1][name], rel=1e-3, abs=1e-4), name
    weights = [
        torch.cat([w.detach().flatten() for w in trainer.model.parameters()]) for trainer in (ours, theirs)
    ]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
    kept = ("model.safetensors", "adapter_model.safetensors", "config.json", "adapter_config.json")
    saved = [files(trainer) for trainer in (ours, theirs)]
    assert saved[0].intersection(kept) == saved[1].intersection(kept)


def adapter(with_adapter: bool, **options: Any) -> dict[str, Any]:
    if not with_adapter:
        return {}
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], **options}
    return {"peft_config": lambda: peft.LoraConfig(**config)}


@with_pinned("trl")
@settings(max_examples=5)  # half a second for each
@given(case=sft_arguments(), with_adapter=st.booleans())
def test_supervised_fine_tuning_is_theirs(case: tuple[str, dict[str, Any]], with_adapter: bool) -> None:
    form, drawn = case
    rows = getattr(small, form)(24)
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        options = adapter(with_adapter, task_type="CAUSAL_LM")
        trained = both(Path(folder), "SFT", small.model, rows, drawn, **options)
        check(*trained, ("input_ids", "labels", "seq_lengths"))


@with_pinned("trl")
@settings(max_examples=5)
@given(case=dpo_arguments(), with_adapter=st.booleans())
def test_direct_preferences_are_theirs(case: tuple[str, dict[str, Any]], with_adapter: bool) -> None:
    form, drawn = case
    rows = pairs(24) if form == "pairs" else talks(24, explicit=form == "talks")
    options: dict[str, Any] = {"ref_model": small.model}
    if with_adapter:
        # Of an adapter that changes nothing yet, the sign of a reward is that of a rounding error.
        options = adapter(with_adapter, task_type="CAUSAL_LM", init_lora_weights=False)
        drawn = read(drawn | {"sync_ref_model": False})
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        trained = both(Path(folder), "DPO", lambda: moved(small.model()), rows, drawn, **options)
        check(*trained, ("prompt_ids", "chosen_ids", "rejected_ids"))


def judge() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(small.config(num_labels=1))


@st.composite
def reward_arguments(draw: st.DrawFn) -> dict[str, Any]:
    return chosen(draw, REWARD) | sizes(draw)


@with_pinned("trl")
@settings(max_examples=5)
@given(
    drawn=reward_arguments(),
    form=st.sampled_from(["pairs", "talks", "margins"]),
    with_adapter=st.booleans(),
)
def test_rewards_are_theirs(drawn: dict[str, Any], form: str, with_adapter: bool) -> None:
    rows = talks(24) if form == "talks" else pairs(24)
    if form == "margins":
        rows = [{**row, "margin": at / 8} for at, row in enumerate(rows)]
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        options = adapter(with_adapter, task_type="SEQ_CLS")
        ours, theirs = both(Path(folder), "Reward", judge, rows, drawn, **options)
        check(ours, theirs, ("margin",))
        for mine, other in zip(ours.train_dataset, theirs.train_dataset, strict=True):
            for name in ("chosen_ids", "rejected_ids"):
                assert [*mine["prompt_ids"], *mine[name]] == other[name]


@with_pinned("trl")
@settings(max_examples=5)
@given(drawn=kto_arguments(), form=st.sampled_from(["judged", "pairs"]))
def test_judged_answers_are_theirs(drawn: dict[str, Any], form: str) -> None:
    """They pair each prompt of an evaluation with the answers of as many rows as a batch of training has."""
    rows = pairs(24)
    drawn |= {"per_device_eval_batch_size": drawn["per_device_train_batch_size"]}
    if form == "pairs":  # the mean of their margins is one of batches with both kinds of answers
        drawn |= {"eval_strategy": "no"}
    else:
        judged = [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in rows
            for name in ("chosen", "rejected")
        ]
        rows = [row for at, row in enumerate(judged) if at % 3]
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        trained = both(Path(folder), "KTO", lambda: moved(small.model()), rows, drawn, ref_model=small.model)
        check(*trained, ("prompt_ids", "completion_ids", "label"))
