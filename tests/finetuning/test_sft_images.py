"""Fine-tuning on images: families of models, columns, and what is refused."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.finetuning import small, vision_families
from tests.finetuning.vision_families import FAMILIES, family
from tests.versions import is_older

from windlass import prepare_multimodal_messages
from windlass.callbacks.samples_log import read_samples
from windlass.core.errors import ConfigError, DataError, ModelError, OutdatedDependencyError
from windlass.finetuning.sft_data import holds_images
from windlass.finetuning.sft_trainer import SFTTrainer
from windlass.text.forms import LocatedRows
from windlass.transforms import document_attention


def trainer_of(folder: Path, name: str, rows: Any, **changes: Any) -> SFTTrainer:
    model, processor = family(name)
    names = ("eval_dataset", "peft_config", "callbacks")
    passed = {key: changes.pop(key) for key in names if key in changes}
    options = {"max_length": None, "assistant_only_loss": True, **changes}
    return SFTTrainer(
        model, small.arguments(folder, **options), None, rows, processing_class=processor, **passed
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=vision_families.LOADED) if name == "idefics3" else name for name in FAMILIES],
)
def test_a_model_learns_from_images_and_is_loaded_again_with_its_processor(tmp_path: Path, name: str) -> None:
    import transformers

    trainer = trainer_of(tmp_path, name, vision_families.rows(), save_strategy="steps", save_steps=3)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    shown = "".join(text for text, _ in read_samples(tmp_path)[0]["pieces"])
    assert re.search(r"\[image: \d+ tokens\]", shown), "the place of the image"
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


def mixed_rows(folder: Path | None = None) -> list[dict[str, Any]]:
    """Rows with one image, with two and with none; images are files if there is a folder."""
    rows: list[dict[str, Any]] = vision_families.rows(9)
    for at, row in enumerate(rows):
        row["images"] = [[], row["images"], [*row["images"], vision_families.picture(20 + at)]][at % 3]
        if folder is not None:
            files = [folder / f"{at}-{number}.png" for number in range(len(row["images"]))]
            for file, image in zip(files, row["images"], strict=True):
                image.save(file)
            row["images"] = [str(file) for file in files]
    return rows


def weights(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_table_files_and_pictures_train_the_same_model_in_workers_too(tmp_path: Path) -> None:
    import datasets

    files, pictures = mixed_rows(tmp_path), mixed_rows()
    kind = datasets.Features(
        {"images": [datasets.Image()],
         "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
    )  # fmt: skip
    table = datasets.Dataset.from_list(pictures, features=kind)
    inside = [
        {"messages": [{"role": "user", "content": [*({"type": "image", "path": image} for image in row["images"]),
                                                   {"type": "text", "text": row["messages"][0]["content"]}]},
                      row["messages"][1]]}
        for row in files
    ]  # fmt: skip
    found = []
    for rows, workers in ((pictures, 0), (files, 2), (table, 0), (inside, 0)):
        trainer = trainer_of(
            tmp_path / "run", "qwen2.5-vl", rows, dataloader_num_workers=workers, max_steps=2
        )
        assert "PIL" not in repr(trainer.train_dataset[1]["images"]) or rows is pictures
        trainer.train()
        found.append(weights(trainer))
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", "idefics3", mixed_rows(tmp_path), max_steps=4)
    whole.train()
    cut = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer_of(tmp_path / "cut", "idefics3", mixed_rows(tmp_path), **cut).train()
    resumed = trainer_of(tmp_path / "cut", "idefics3", mixed_rows(tmp_path), **cut)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_is_the_mean_over_the_answers_tokens(tmp_path: Path, name: str) -> None:
    trainer = trainer_of(
        tmp_path, name, mixed_rows(), eval_dataset=mixed_rows(), per_device_eval_batch_size=2
    )
    total, count = 0.0, 0
    trainer.model.eval()
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        with torch.no_grad():
            logits = trainer.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        targets = batch["labels"][0, 1:]
        total += torch.nn.functional.cross_entropy(logits[0, :-1], targets, reduction="sum").item()
        count += int((targets != -100).sum())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(("target", "trained"), [("language", "language_model"), ("vision", "vision_tower")])
def test_an_adapter_on_one_part_leaves_the_other_as_it_is(tmp_path: Path, target: str, trained: str) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=rf".*{trained}.*\.(q_proj|v_proj)", task_type="CAUSAL_LM")
    trainer = trainer_of(
        tmp_path, "llava", mixed_rows(tmp_path), peft_config=config, gradient_checkpointing=True
    )
    before = weights(trainer)
    trainer.train()
    changed = [name for name, value in weights(trainer).items() if not torch.equal(value, before[name])]
    assert changed
    assert all("lora" in name and trained in name for name in changed)
    trainer.save_model(str(tmp_path / "adapter"))
    base, _ = family("llava")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in again.state_dict().items())


def test_a_frozen_tower_stays_and_the_rest_learns(tmp_path: Path) -> None:
    model, processor = family("gemma3")
    model.model.vision_tower.requires_grad_(False)
    args = small.arguments(tmp_path, max_length=None, gradient_checkpointing=True)
    trainer = SFTTrainer(model, args, train_dataset=mixed_rows(), processing_class=processor)
    before = weights(trainer)
    trainer.train()
    same = {name: torch.equal(value, before[name]) for name, value in weights(trainer).items()}
    assert all(kept for name, kept in same.items() if "vision_tower" in name)
    assert not any(kept for name, kept in same.items() if "language_model.layers" in name and "proj" in name)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"truncation_mode": "keep_end"}, "would remove the images"),
    (
        {"packing": True, "max_length": 64, "packing_strategy": "wrapped"},
        "would cut rows, and images with them",
    ),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_contradicts_images_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, "llava", mixed_rows(), **options)


def test_faults_of_rows_are_named_before_training(tmp_path: Path) -> None:
    rows = mixed_rows(tmp_path)
    Path(rows[4]["images"][0]).write_bytes(b"no image")
    with pytest.raises(DataError, match=r"row 4: the image '.*4-0\.png' does not open: cannot identify"):
        trainer_of(tmp_path, "llava", rows)
    places = [f"photos.jsonl:{line}" for line in range(1, 10)]
    with pytest.raises(DataError, match=r"photos\.jsonl:5: the image '.*4-0\.png' does not open"):
        trainer_of(tmp_path, "llava", LocatedRows(rows, places))
    address = [{**rows[1], "images": ["https://example.org/a.png"]}]
    with pytest.raises(DataError, match=r"row 0: .*addresses are not read"):
        trainer_of(tmp_path, "llava", address)
    with pytest.raises(DataError, match=r"row 2: has \d+ tokens, more than max_length=50"):
        trainer_of(tmp_path, "llava", mixed_rows(), max_length=50, truncation_mode="error")


def test_an_evaluation_set_with_images_needs_a_trainer_that_knows_them(tmp_path: Path) -> None:
    model, processor = family("llava")
    texts = [{"messages": row["messages"]} for row in mixed_rows()]
    trainer = SFTTrainer(model, small.arguments(tmp_path), train_dataset=texts, processing_class=processor)
    with pytest.raises(
        ConfigError, match=r"eval_dataset=\['images'\]: has images, and no dataset of the constructor"
    ):
        trainer.evaluate(mixed_rows())
    assert not holds_images([texts[0], {**texts[1], "image": None}])
    assert holds_images([texts[0], {**texts[1], "image": np.zeros((2, 2, 3), np.uint8)}])
    rows = [texts[0], {**texts[1], "images": ["missing.png"]}]
    with pytest.raises(DataError, match=r"row 1: the image 'missing\.png' does not open"):
        SFTTrainer(model, small.arguments(tmp_path), train_dataset=rows, processing_class=processor)
    with pytest.raises(ConfigError, match=r"eval_dataset=\['images'\]: has images"):
        trainer.evaluate(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_logits_are_made(tmp_path: Path, name: str) -> None:
    trainer = trainer_of(tmp_path, name, mixed_rows(), max_steps=1)
    made: list[int] = []
    head: Any = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, output: made.append(output.numel()))
    trainer.train()
    assert made[-1] == 1  # the loss; earlier ones are those of the model's own loss on eight tokens


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("joined", [{"packing": True, "max_length": 256}, {"padding_free": True}])
def test_joined_rows_have_the_loss_of_rows_alone(tmp_path: Path, name: str, joined: dict[str, Any]) -> None:
    rows = mixed_rows()
    plain = trainer_of(tmp_path, name, rows, eval_dataset=rows, per_device_eval_batch_size=9)
    trainer = trainer_of(tmp_path, name, rows, eval_dataset=rows, per_device_eval_batch_size=2, **joined)
    if "packing" in joined:
        packed = [(len(row["seq_lengths"]), len(row["images"])) for row in trainer.train_dataset]
        assert sum(count for count, _ in packed) == 9
        assert sum(images for _, images in packed) == 9
        assert max(count for count, _ in packed) > 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    trainer.train()
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3"])
def test_the_gradient_of_a_joined_row_is_that_of_its_rows(tmp_path: Path, name: str) -> None:
    """With an adapter, which calls the model's forward without its hooks; and the images of one row are several."""
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)", task_type="CAUSAL_LM"
    )
    rows = mixed_rows()[:3]
    norms = []
    for joined in ({}, {"padding_free": True}):
        trainer = trainer_of(
            tmp_path, name, rows, peft_config=config, per_device_train_batch_size=3, max_steps=1,
            logging_steps=1, **joined,
        )  # fmt: skip
        with torch.no_grad():
            for weight_name, weight in trainer.model.named_parameters():
                if "lora_B" in weight_name:
                    weight.fill_(0.1)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", "paligemma"])
def test_a_model_that_does_not_keep_images_apart_is_not_packed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would be that `images_apart` does not know."""
    if name == "gemma3" and is_older("transformers", "5.18"):
        pytest.skip("Gemma 3 keeps the images of documents apart by itself in transformers before 5.18")
    monkeypatch.setattr(document_attention, "images_apart", contextlib.nullcontext)
    with pytest.raises(ModelError, match="without packing and padding_free"):
        trainer_of(tmp_path, name, mixed_rows(), packing=True, max_length=256)


def test_a_stream_trains_as_the_table_does_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Rows with one image, with two and with none; images are files, or records of a table."""
    import datasets

    rows = mixed_rows(tmp_path)
    table = datasets.Dataset.from_list(rows).cast_column("images", [datasets.Image()])
    streams = {
        "table": table.to_iterable_dataset(),
        "generator": datasets.IterableDataset.from_generator(lambda: iter(rows)),
    }
    packed = streams["table"]
    if is_older("datasets", "3.4"):
        del streams["table"]
    options = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    expected = trainer_of(tmp_path / "whole", "llava", table, max_steps=4, **options)
    expected.train()
    for name, stream in streams.items():
        trainer = trainer_of(
            tmp_path / name, "llava", stream, max_steps=2, save_strategy="steps", save_steps=2, **options
        )
        trainer.train()
        longer = trainer_of(tmp_path / name, "llava", stream, max_steps=4, **options)
        longer.train(resume_from_checkpoint=True)
        for key, value in weights(expected).items():
            torch.testing.assert_close(weights(longer)[key], value, rtol=0, atol=0)
    with pytest.raises(DataError, match="a stream with images is not packed: set packing=False"):
        trainer_of(tmp_path, "llava", packed, max_steps=1, packing=True, max_length=256)


def test_a_stream_of_a_table_with_images_needs_newer_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.delattr(datasets.IterableDataset, "decode", raising=False)
    table = datasets.Dataset.from_list(mixed_rows(tmp_path)).cast_column("images", [datasets.Image()])
    with pytest.raises(OutdatedDependencyError, match=r"datasets>=3\.4 is needed"):
        trainer_of(tmp_path, "llava", table.to_iterable_dataset(), max_steps=1)


def test_a_collator_of_the_script_gets_the_rows_as_they_are(tmp_path: Path) -> None:
    """As scripts for images are written for TRL; and the model may be a configuration."""
    model, processor = family("llava")
    rows = [{**row, "images": row["images"][:1]} for row in mixed_rows() if row["images"]]

    def collate(samples: list[Any]) -> Any:
        texts = [
            processor.apply_chat_template(prepare_multimodal_messages(s["messages"], s["images"]))
            for s in samples
        ]
        batch = processor(
            text=texts, images=[s["images"] for s in samples], padding=True, return_tensors="pt"
        )
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    args = small.arguments(tmp_path, max_length=None)
    trainer = SFTTrainer(model.config, args, collate, rows, rows, processing_class=processor)
    assert trainer.train_dataset is rows
    assert type(trainer.model) is type(model)
    trainer.train()
    trainer.evaluate()
