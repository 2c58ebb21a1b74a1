from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small, vision_families
from tests.finetuning.vision_families import FAMILIES, family

from windlass.finetuning.sft_trainer import SFTTrainer


def trainer_of(folder: Path, name: str, rows: Any, **changes: Any) -> SFTTrainer:
    model, processor = family(name)
    names = ("eval_dataset", "peft_config", "callbacks")
    passed = {key: changes.pop(key) for key in names if key in changes}
    options = {"max_length": None, "assistant_only_loss": True, **changes}
    return SFTTrainer(
        model, small.arguments(folder, **options), None, rows, processing_class=processor, **passed
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_learns_from_images_and_is_loaded_again_with_its_processor(tmp_path: Path, name: str) -> None:
    import transformers

    trainer = trainer_of(tmp_path, name, vision_families.rows(), save_strategy="steps", save_steps=3)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    folder = str(tmp_path / "checkpoint-3")
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    changed = [key for key, value in loaded.items() if not torch.equal(value, before[key])]
    assert any("vision" in key or "visual" in key for key in changed)
    assert all(torch.equal(value, loaded[key]) for key, value in trainer.model.state_dict().items())
    # that of Qwen is found by its name only where torchvision is installed, for it processes videos too
    auto = type(trainer.processing_class) if name.startswith("qwen") else transformers.AutoProcessor
    processor = auto.from_pretrained(folder)
    assert processor.image_token == trainer.processing_class.image_token
    assert processor.chat_template == trainer.processing_class.chat_template
