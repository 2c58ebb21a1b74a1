"""A trainer with data and a loss of another kind uses the model, tokenizer and adapter as `SFTTrainer` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.test_peft_adapters import lora
from tests.trainer.preference_trainer import PreferenceTrainer, accuracy

from windlass import default_data_collator
from windlass.core.errors import ConfigError, ModelError
from windlass.finetuning.tuned_model import open_tuned_model

peft = pytest.importorskip("peft")


def test_preferences_are_trained_with_an_adapter_on_a_loaded_model(tmp_path: Path) -> None:
    # An `SFTTrainer` refuses these settings, which are about the data of an `SFTTrainer`.
    args = small.arguments(
        tmp_path / "run", packing=True, max_length=None, max_steps=8, gradient_checkpointing=True,
        remove_unused_columns=False,
    )  # fmt: skip
    tuned = open_tuned_model(small.saved(tmp_path / "base"), args, peft_config=lora())
    assert (tuned.tokenizer.pad_token, tuned.processing_class) == ("<pad>", tuned.tokenizer)
    frozen = {n: p.clone() for n, p in tuned.model.named_parameters() if not p.requires_grad}
    ids = torch.arange(6, 14)
    pairs = [{"chosen": ids.roll(shift), "rejected": ids.flip(0).roll(shift)} for shift in range(8)]
    trainer = PreferenceTrainer(
        tuned.model, args, train_dataset=pairs, eval_dataset=pairs, compute_metrics=accuracy,
        processing_class=tuned.processing_class, data_collator=default_data_collator,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    now = dict(trainer.model.named_parameters())
    assert frozen
    assert all(torch.equal(now[name], kept) for name, kept in frozen.items())


def test_a_model_that_is_divided_is_not_spread_over_devices(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base")
    for where in ("auto", {"model.embed_tokens": 0, "": "cpu"}):
        args = small.arguments(tmp_path, fsdp="full_shard", model_init_kwargs={"device_map": where})
        with pytest.raises(ConfigError, match=r"model_init_kwargs.device_map=.*FSDP2 divides it among ranks"):
            open_tuned_model(name, args)
    args = small.arguments(tmp_path, fsdp="full_shard", model_init_kwargs={"device_map": {"": "cpu"}})
    assert open_tuned_model(name, args).model.device.type == "cpu"


def test_a_folder_of_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    peft.get_peft_model(small.model(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds an adapter, and no model: .*is_trainable=True"):
        open_tuned_model(str(tmp_path), small.arguments(tmp_path / "run"))
