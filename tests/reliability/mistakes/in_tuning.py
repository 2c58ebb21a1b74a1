"""Mistakes in scripts that fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.finetuning import small as texts
from tests.reliability.mistakes.mistake import Mistakes

from windlass import SFTConfig, SFTTrainer

TUNING = Mistakes()
mistake = TUNING.add


def fine_tune(folder: Path, data: Any, model: Any = None, tokenizer: Any = None, **given: Any) -> None:
    config = given.pop("peft_config", None)
    args = texts.arguments(folder / "run", **given)
    SFTTrainer(
        model or texts.model(), args, train_dataset=data, processing_class=tokenizer or texts.tokenizer(),
        peft_config=config,
    ).train()  # fmt: skip


@mistake("max_length above the model's positions", "max_length=512", "32 positions", "151 tokens", warns=True)
def max_length_above_positions(folder: Path) -> None:
    data = [{"text": " ".join(["cat"] * 150)} for _ in range(8)]
    fine_tune(folder, texts.table(data), texts.model(max_position_embeddings=32), max_length=512)


@mistake("Columns that SFT does not know", "question", "reply", "prompt", "completion")
def no_known_columns(folder: Path) -> None:
    fine_tune(folder, texts.table([{"question": "the cat", "reply": "sat"} for _ in range(8)]))


@mistake("A tokenizer of another model", "12 rows", "resize_token_embeddings")
def token_of_another_tokenizer(folder: Path) -> None:
    fine_tune(folder, texts.table(texts.texts()), texts.model(vocab_size=12))


@mistake("Conversations without a chat template", "chat template", "chat_template")
def chat_without_template(folder: Path) -> None:
    plain = texts.tokenizer()
    plain.chat_template = None
    fine_tune(folder, texts.table(texts.chats()), tokenizer=plain)


@mistake("Packing without a length", "packing", "max_length")
def packing_without_length(folder: Path) -> None:
    fine_tune(folder, texts.table(texts.texts()), packing=True, max_length=None)


@mistake("A module that an adapter does not find", "q_projj", "q_proj")
def misspelt_adapter_target(folder: Path) -> None:
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_projj"])
    fine_tune(folder, texts.table(texts.texts()), peft_config=config)


@mistake("A misspelt argument of SFT", "max_lenght", "max_length")
def plain_arguments_for_sft(folder: Path) -> None:
    SFTTrainer(
        texts.model(), SFTConfig(str(folder), max_lenght=512), train_dataset=texts.table(texts.texts())
    )  # type: ignore[call-arg]


@mistake("A trainer of TRL", "GRPOTrainer", "windlass run")
def trainer_of_trl(folder: Path) -> None:
    from windlass import GRPOTrainer  # type: ignore[attr-defined]  # noqa: F401
