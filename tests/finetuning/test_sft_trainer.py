"""SFTTrainer as scripts use it: what it trains on, what it logs, and that it trains as a plain loop does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of
from tests.said import listening

from windlass import DatasetMixture, SFTConfig, SFTTrainer, TrainingArguments
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.core.errors import ConfigError, DataError
from windlass.core.optional import is_available

pytest.importorskip("transformers")
pytest.importorskip("datasets")


# --- data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "changes", "targets"),
    [
        (small.texts(3), {}, "all"),
        (small.prompts(3), {}, "completion"),
        (small.prompts(3), {"completion_only_loss": False}, "all"),
        (small.chats(3), {}, "all"),
        (small.chats(3), {"assistant_only_loss": True}, "answer"),
    ],
)
def test_labels_are_in_the_dataset(tmp_path: Path, rows: Any, changes: Any, targets: str) -> None:
    trainer = trainer_of(tmp_path, rows, **changes)
    tokenizer = small.tokenizer()
    for prepared, row in zip(trainer.train_dataset, rows, strict=True):
        kept = [i for i in prepared["labels"] if i != -100]
        whole = prepared["input_ids"]
        assert whole[-1] == tokenizer.eos_token_id
        if targets == "all":
            assert kept == whole
        else:
            text = row["completion"] if "completion" in row else row["messages"][1]["content"]
            assert tokenizer.decode(kept) == f"{text.strip()} <eos>"


def test_every_weight_is_trained_packed_or_not(tmp_path: Path) -> None:
    for packing in (False, True):
        trainer = trainer_of(
            tmp_path / str(packing), small.texts(), packing=packing, max_steps=-1, num_train_epochs=3
        )
        before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] > 0
        assert not [
            name for name, weight in trainer.model.named_parameters() if torch.equal(weight, before[name])
        ]


def test_packed_rows_have_their_lengths(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.texts(), packing=True)
    for row in trainer.train_dataset:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 64
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1
    assert "attention_mask" not in batch


def test_a_formatting_function_makes_texts(tmp_path: Path) -> None:
    rows = [{"q": "the cat", "a": "sat on"}] * 4
    trainer = trainer_of(tmp_path, rows, formatting_func=lambda row: f"{row['q']} {row['a']}")
    assert small.tokenizer().decode(trainer.train_dataset[0]["input_ids"]) == "the cat sat on <eos>"


def test_evaluation_sets_are_prepared_by_name_and_when_passed(tmp_path: Path) -> None:
    sets = {"first": small.table(small.texts(4)), "second": small.table(small.prompts(4))}
    trainer = trainer_of(tmp_path, small.texts(), eval_dataset=sets)
    found = trainer.evaluate()
    for name in ("first", "second"):
        assert {
            f"eval_{name}_{figure}" for figure in ("loss", "entropy", "mean_token_accuracy")
        } <= found.keys()
    assert trainer.evaluate("first")["eval_loss"] == found["eval_first_loss"]
    assert trainer.evaluate(small.table(small.texts(4)))["eval_loss"] == found["eval_first_loss"]
    assert trainer.state.log_history[-1].keys() >= {"eval_entropy", "eval_num_tokens"}


@pytest.mark.parametrize("packing", [False, True])
def test_a_mixture_is_prepared_by_source_and_resumed(tmp_path: Path, packing: bool) -> None:
    def trainer(name: str, **changes: Any) -> SFTTrainer:
        mixture = DatasetMixture({"texts": small.texts(), "chats": small.chats()}, {"texts": 3, "chats": 1})
        return trainer_of(tmp_path / name, mixture, packing=packing, max_length=24, max_steps=9, **changes)

    whole = trainer("whole")
    whole.train()
    assert whole.state.epoch is not None
    assert whole.state.epoch > 1, "the second epoch reads other rows of the sources"
    trainer("cut", save_strategy="steps", save_steps=7).train()
    (tmp_path / "cut" / "checkpoint-9").rename(tmp_path / "cut" / "later")
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-7"))
    for name, weight in resumed.model.named_parameters():
        assert torch.equal(weight, whole.model.get_parameter(name))
    assert {name.partition(": ")[0] for name in whole.data_facts()} == {
        "train texts",
        "train chats",
        "mixture",
    }


def test_alpaca_trains_the_output(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [{"instruction": "the cat", "output": "sat on"}])
    row = trainer.train_dataset[0]
    assert small.tokenizer().decode([i for i in row["labels"] if i != -100]) == "sat on <eos>"


@pytest.mark.parametrize(
    "read",
    [{"text": "the cat sat on"}, {"messages": [{"role": "user", "content": "the cat sat on"}]}],
    ids=["text", "messages"],
)
def test_columns_beside_those_that_are_read_do_not_ask_for_completions(
    read: dict[str, Any], tmp_path: Path
) -> None:
    """tatsu-lab/alpaca has the text of a row beside what it was made of."""
    trainer = trainer_of(tmp_path, [{"instruction": "the cat", "output": "sat on", **read}])
    row = trainer.train_dataset[0]
    assert -100 not in row["labels"]
    assert "the cat sat on" in small.tokenizer().decode(row["labels"])


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    stream, given = small.table(small.texts()).to_iterable_dataset(), AcceleratorConfig(dispatch_batches=True)
    trainer = trainer_of(tmp_path, stream, accelerator_config=given)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.args.accelerator_config.dispatch_batches is False
    assert given.dispatch_batches is True, "the script may pass it to a trainer of other data"


def test_prepared_rows_are_left_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": [6, 7, 8, 1], "labels": [-100, 7, 8, 1]}] * 4
    trainer = trainer_of(tmp_path, rows, dataset_kwargs={"skip_prepare_dataset": True})
    trainer.train()
    assert trainer.train_dataset[0]["labels"] == [-100, 7, 8, 1]
    masked = [{"input_ids": [6, 7, 8, 1], "completion_mask": [0, 1, 1, 1]}] * 4
    with pytest.raises(DataError, match="Add a 'labels' column"):
        trainer_of(tmp_path, masked, dataset_kwargs={"skip_prepare_dataset": True})
    with pytest.raises(DataError, match="Add a 'labels' column"):
        trainer.evaluate(small.table(masked))


def test_a_transform_is_refused(tmp_path: Path) -> None:
    rows = small.table(small.texts()).with_transform(lambda batch: batch)
    with pytest.raises(DataError, match="skip_prepare_dataset"):
        trainer_of(tmp_path, rows)


# --- figures --------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_forward(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.prompts(4), max_steps=1, eval_dataset=small.table(small.prompts(4)))
    model = small.model().eval()
    entropy = correct = targets = loss = tokens = 0.0
    for row in trainer.eval_dataset:
        with torch.no_grad():
            log_p = F.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0, :-1], -1)
        labels = torch.tensor(row["labels"][1:])
        kept = labels != -100
        entropy -= float((log_p.exp() * log_p).sum(-1)[kept].sum())
        correct += int((log_p.argmax(-1) == labels)[kept].sum())
        loss -= float(log_p[kept].gather(1, labels[kept][:, None]).sum())
        targets, tokens = targets + int(kept.sum()), tokens + len(row["input_ids"])
    found = trainer.evaluate()
    assert found["eval_entropy"] == pytest.approx(entropy / targets, rel=1e-6)
    assert found["eval_mean_token_accuracy"] == pytest.approx(correct / targets)
    assert found["eval_loss"] == pytest.approx(loss / targets, rel=1e-6)
    trainer.train()
    first, last = trainer.state.log_history[-2:]
    assert first["loss"] == pytest.approx(loss / targets, rel=1e-6)
    assert first["entropy"] == pytest.approx(entropy / targets, rel=1e-5)
    assert first["num_tokens"] == tokens
    assert "train_loss" in last


def test_checkpoints_come_with_a_model_card(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the client of the Hub")
    model = small.model()
    model.add_model_tags(["mine"])
    trainer_of(tmp_path, small.texts(), model, max_steps=1, save_strategy="steps", save_steps=1).train()
    card = hub.ModelCard.load(tmp_path / "README.md").data
    assert {"windlass", "sft", "mine"} <= set(card.tags)


def test_tokens_and_figures_are_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    whole = trainer_of(tmp_path / "a", small.texts(), **options)
    whole.train()
    again = trainer_of(tmp_path / "a", small.texts(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    rows = [next(r for r in t.state.log_history if r["step"] == 4 and "loss" in r) for t in (whole, again)]
    assert rows[0] == rows[1]


def test_tokens_are_counted_once_when_memory_runs_out(tmp_path: Path) -> None:
    from tests.finetuning.hungry import Hungry

    counted = []
    for limit in (4, 2):
        trainer = trainer_of(
            tmp_path / str(limit),
            small.texts(),
            Hungry.of(limit),
            auto_find_batch_size=True,
            gradient_accumulation_steps=2,
            max_steps=2,
        )
        trainer.train()
        counted.append([r["num_tokens"] for r in trainer.state.log_history if "num_tokens" in r])
    assert counted[0] == counted[1]
    assert trainer.args.train_batch_size == 4


def test_the_best_model_is_found_by_accuracy(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, small.texts(), eval_dataset=small.table(small.texts(4)), eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, metric_for_best_model="eval_mean_token_accuracy",
        load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    rates = [r["eval_mean_token_accuracy"] for r in trainer.state.log_history if "eval_loss" in r]
    assert trainer.state.best_metric == max(rates)


def test_logits_reach_the_metrics(tmp_path: Path) -> None:
    seen = {}

    def shapes(found: Any) -> dict[str, float]:
        seen["shapes"] = found.predictions.shape, found.label_ids.shape
        return {"x": 1.0}

    trainer = SFTTrainer(
        small.model(), small.arguments(tmp_path), train_dataset=small.table(small.texts()), compute_metrics=shapes,
        eval_dataset=small.table(small.texts(4)), processing_class=small.tokenizer(),
    )  # fmt: skip
    assert trainer.evaluate()["eval_x"] == 1.0
    assert seen["shapes"][0] == (*seen["shapes"][1], 36)


# --- the same losses as a plain loop --------------------------------------------------------------------------


def plain_loop(model: Any, batches: list[list[Any]], rate: float) -> list[float]:
    """Adam at a linearly falling rate, each document alone; the loss is the mean over the targets of an update."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for step, documents in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / len(batches))
        count = sum(sum(label != -100 for label in labels[1:]) for _, labels in documents)
        total = 0.0
        for ids, labels in documents:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            loss = (
                F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum") / count
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def documents_of(row: Any) -> list[Any]:
    found, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        found.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
        start += length
    return found


@pytest.mark.parametrize("updates", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_updates_are_those_of_a_plain_loop(tmp_path: Path, packing: bool, lora: bool, updates: int) -> None:
    def adapter() -> Any:
        peft = pytest.importorskip("peft")
        return peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")

    batch = 1 if packing else 4
    trainer = trainer_of(
        tmp_path, small.prompts(), max_steps=updates, packing=packing, per_device_train_batch_size=batch,
        peft_config=adapter() if lora else None, gradient_accumulation_steps=2 if packing else 1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    if lora:
        import copy

        model = copy.deepcopy(trainer.model)
    else:
        model = small.model()
    rows = list(trainer.train_dataset)
    order = [i for epoch in range(60) for i in range(len(rows))]
    with listening() as said:
        trainer.train()
    # Which a script may need to return: this loss is that of the trainer itself.
    assert not [line for line in said if "LossTerms" in line]
    batches, at = [], 0
    while len(batches) < updates:  # updates do not go beyond the end of an epoch
        size = min(
            trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps,
            len(rows) - at % len(rows),
        )
        batches.append([d for i in order[at : at + size] for d in documents_of(rows[i])])
        at += size
    found = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    expected = plain_loop(model, batches, trainer.args.learning_rate)
    assert len(found) == updates
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert expected[-1] < expected[0] - updates / 500


# --- arguments ------------------------------------------------------------------------------------------------


def test_a_model_by_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    folder = small.saved(tmp_path / "model")
    for model in (folder, small.model().from_pretrained(folder)):
        trainer = SFTTrainer(
            model, small.arguments(tmp_path / "out"), train_dataset=small.table(small.texts())
        )
        assert trainer.model.dtype == torch.float32
        assert trainer.processing_class.eos_token == "<eos>"
    args = small.arguments(tmp_path / "out", model_init_kwargs={"torch_dtype": "bfloat16"})
    assert SFTTrainer(folder, args, train_dataset=small.table(small.texts())).model.dtype == torch.bfloat16
    if not is_available("flash_attn"):
        args = small.arguments(
            tmp_path / "out", model_init_kwargs={"attn_implementation": "flash_attention_2"}
        )
        with pytest.raises(
            ConfigError, match=r"model_init_kwargs=.*not installed.*set attn_implementation to sdpa"
        ):
            SFTTrainer(folder, args, train_dataset=small.table(small.texts()))


def test_a_config_makes_new_weights(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.texts(), model=small.config())
    assert trainer.train().global_step == 3


def test_without_a_tokenizer_the_error_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass processing_class=tokenizer"):
        SFTTrainer(small.model(), small.arguments(tmp_path), train_dataset=small.table(small.texts()))


def test_the_form_of_the_guides(tmp_path: Path) -> None:
    model = small.model().from_pretrained(small.saved(tmp_path / "model"))
    args = TrainingArguments(str(tmp_path / "out"), max_steps=2, report_to="none", use_cpu=True)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=small.table(small.texts()), dataset_text_field="text",
        max_seq_length=5,
    )  # fmt: skip
    assert trainer.args.max_length == 5
    assert not trainer.args.bf16
    assert trainer.args.learning_rate == args.learning_rate
    assert max(map(len, trainer.train_dataset["input_ids"])) == 5
    trainer.train()


def test_default_arguments_are_named_after_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = SFTTrainer(small.saved(tmp_path / "base"), train_dataset=small.table(small.texts()))
    assert trainer.args.output_dir == "base-SFT"
    assert isinstance(trainer.args, SFTConfig)
    assert {"windlass", "sft"} <= set(trainer.model.model_tags)


def test_tokens_are_written_to_the_configs(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.texts(), eos_token="<|user|>", pad_token="<unk>")
    assert trainer.model.config.eos_token_id == 3
    assert trainer.model.generation_config.eos_token_id == [3, 1]
    assert trainer.model.config.pad_token_id == trainer.model.generation_config.pad_token_id == 2
    trainer.train()
    assert trainer.model.generation_config.eos_token_id == [3, 1]
    with pytest.raises(ConfigError, match="is not found in the vocabulary"):
        trainer_of(tmp_path, small.texts(), eos_token="<none>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding_free": True}, "`max_length` is not enforced"),
        ({"packing": True, "max_length": None}, "When packing is enabled"),
        ({"packing": True, "data_collator": list}, "leave data_collator out"),
        ({"formatting_func": str, "completion_only_loss": True}, "has no completion"),
        ({"assistant_only_loss": True}, "assistant_only_loss"),
        ({"dataset_kwargs": {"add_special_tokens": False}}, "the options are skip_prepare_dataset and"),
        ({"dataset_kwargs": {"skip_prepare_dataset": "false"}}, "must be True or False"),
        ({"loss_type": "dft", "compute_loss_func": print}, "is a loss of its own"),
        ({"router_aux_loss_coef": 0.1}, "is not a Mixture-of-Experts model"),
    ],
)
def test_contradictions_are_found_before_training(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, small.texts(), **changes)


def test_a_training_dataset_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trainer_of(tmp_path, None)
    with pytest.raises(TypeError, match="must be a `Dataset` or `IterableDataset`"):
        trainer_of(tmp_path, {"train": small.texts()})
    with pytest.raises(ConfigError, match="images, which need a processor"):
        trainer_of(tmp_path, [{"text": "the cat", "image": 1}])


def test_offloading_and_recomputation_change_nothing(tmp_path: Path) -> None:
    losses = []
    options = (
        {}, {"activation_offloading": True}, {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    )  # fmt: skip
    for number, changes in enumerate(options):
        trainer = trainer_of(tmp_path / str(number), small.texts(), **changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert all(other == losses[0] for other in losses[1:])


def test_an_optimizer_that_updates_in_the_backward_clips(tmp_path: Path) -> None:
    """With two backwards through the graph, in which the loss without logits has one node."""
    losses = []
    for name in ("sgd", "lomo"):
        trainer = trainer_of(tmp_path / name, small.texts(), optim=name, max_grad_norm=0.5)
        trainer.train()
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_defaults_train_on_a_cpu(tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), use_cpu=True, max_steps=1, report_to="none")
    trainer = SFTTrainer(
        small.model(), args, train_dataset=small.table(small.texts()), processing_class=small.tokenizer()
    )
    trainer.train()
    assert args.bf16
    assert args.gradient_checkpointing


def test_the_card_says_what_was_fine_tuned_on_what(tmp_path: Path) -> None:
    """With the arguments that scripts of TRL hand to `push_to_hub`."""
    trainer = trainer_of(tmp_path, small.texts())
    trainer.create_model_card(model_name="mine", dataset_name="someone/texts", tags=["more"])
    hub = pytest.importorskip("huggingface_hub", reason="the client of the Hub")
    data = hub.ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.datasets == ["someone/texts"]
    assert {"more", "sft", "windlass"} <= set(data.tags)
