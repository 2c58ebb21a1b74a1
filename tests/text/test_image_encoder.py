"""Tokens and labels of rows with images, in six families of models, compared with TRL's collator and with texts."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.finetuning.vision_families import FAMILIES, family, picture
from tests.versions import with_pinned

from windlass.core.errors import DataError
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.text.chat_template import make_trainable
from windlass.text.image_processing import ImageProcessing
from windlass.text.image_rows import ImageCollator
from windlass.text.prepare_text import PreparedText, prepare_text
from windlass.text.text_options import TextOptions

IGNORED = -100
# What an assistant's turn begins and ends with.
AROUND = {
    "qwen2.5-vl": ("", "<|im_end|>\n"), "qwen3-vl": ("", "<|im_end|>\n"), "llava": ("", "</s>"),
    "idefics3": (" ", "<end_of_utterance>\n"), "gemma3": ("", "<end_of_turn>\n"), "paligemma": ("", "</s>"),
}  # fmt: skip
SIZES = ((16, 16), (40, 16), (16, 24), (32, 32))


def processing(name: str) -> ImageProcessing:
    return ImageProcessing(family(name)[1])


def prepared(images: ImageProcessing, rows: Any, **options: Any) -> PreparedText:
    return prepare_text(
        rows, images.processor.tokenizer, TextOptions(**{"max_length": None, **options}), images=images
    )


def collated(images: ImageProcessing, rows: Any, **options: Any) -> Any:
    collate = ImageCollator(DataCollatorForCausalLM(images.processor.tokenizer.pad_token_id), images)
    return collate(list(prepared(images, rows, **options).dataset))


def conversation(images: int, turns: int, inline: bool = False, system: bool = False) -> dict[str, Any]:
    """Questions on some images, and answers. `inline`: the messages have places for the images."""
    pictures = [picture(i, *SIZES[i % len(SIZES)]) for i in range(images)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Look."}] if system else []
    for turn in range(turns):
        question: Any = f"Is it {turn}? <x>"
        if inline:
            mine = range(turn, images, turns)
            question = [{"type": "text", "text": question}, *({"type": "image"} for _ in mine)]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"Ja {turn}."}]
    return {"images": pictures, "messages": messages}


def every_row() -> list[dict[str, Any]]:
    shapes = product(range(4), (1, 3), (False, True), (False, True))
    return [conversation(*shape) for shape in shapes]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_assistant_wrote_is_trained_with_its_end_and_nothing_else(name: str) -> None:
    images, rows = processing(name), every_row()
    decode = images.processor.tokenizer.decode
    before, after = AROUND[name]
    batch = collated(images, rows, assistant_only_loss=True)
    for row, ids, labels, mask in zip(
        rows, batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        trained = labels != IGNORED
        assert decode(ids[trained]) == "".join(before + answer + after for answer in answers)
        assert torch.equal(labels[trained], ids[trained])
        assert not trained[mask == 0].any()
        assert not torch.isin(ids[trained], torch.tensor(images.processor.image_token_ids)).any()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_processor(name: str) -> None:
    """Whole conversations: every token but those of images and padding is trained."""
    images, rows = processing(name), every_row()
    batch = collated(images, rows)
    for row, ids, labels, mask in zip(
        rows, batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        alone = {} if name == "paligemma" and not row["images"] else processed(images.processor, row)
        if alone:
            assert ids[mask == 1].tolist() == alone
        places = torch.isin(ids, torch.tensor(images.processor.image_token_ids))
        assert (labels[places] == IGNORED).all()
        assert (labels[mask == 0] == IGNORED).all()
        assert bool(places.any()) == bool(row["images"])


def processed(processor: Any, row: Any) -> list[int]:
    """The tokens that the processor makes of a row; PaliGemma's ends each text with a line break."""
    pytest.importorskip("trl")
    from trl.data_utils import prepare_multimodal_messages

    messages = prepare_multimodal_messages(row["messages"], row["images"])
    text = processor.apply_chat_template(messages)
    given = {"images": [row["images"]]} if row["images"] else {}
    ids = processor(text=[text], add_special_tokens=False, **given)["input_ids"][0]
    return list(ids[:-1] if type(processor).__name__ == "PaliGemmaProcessor" else ids)


def trl_batch(processor: Any, rows: Any, **options: Any) -> Any:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    return DataCollatorForVisionLanguageModeling(processor, **options)(copy.deepcopy(rows))


# PaliGemma: its processor refuses a text without images, which TRL passes for completions, and TRL's spans ignore the
# tokens that it adds.
OF_TRL = [name for name in FAMILIES if name != "paligemma"]


@pytest.mark.parametrize("name", OF_TRL)
@with_pinned("transformers")
def test_batches_and_losses_are_those_of_trl(name: str) -> None:
    model, processor = family(name)
    images = ImageProcessing(processor, takes={"token_type_ids", "mm_token_type_ids"})
    rows = [row for row in every_row() if row["images"]]
    template = processor.chat_template
    if "{% generation" not in template:
        template = make_trainable(template, processor.tokenizer, as_parts=name == "idefics3")
    theirs = trl_batch(processor, rows, assistant_only_loss=True, chat_template=template)
    ours = collated(images, rows, assistant_only_loss=True)
    assert_equal(ours, theirs)
    assert_equal_losses(model, ours, theirs)


@pytest.mark.parametrize("name", OF_TRL)
def test_prompts_and_completions_are_those_of_trl(name: str) -> None:
    model, processor = family(name)
    images = ImageProcessing(processor)
    rows = [
        {"images": row["images"], "prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        for row in every_row()
        if row["images"]
    ]
    theirs, ours = trl_batch(processor, rows, completion_only_loss=True), collated(images, rows)
    assert_equal(ours, theirs)
    assert_equal_losses(model, ours, theirs)


def assert_equal(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def assert_equal_losses(model: Any, ours: Any, theirs: Any) -> None:
    with torch.no_grad():
        assert torch.equal(model.eval()(**ours).loss, model(**theirs).loss)


def test_paligemma_gets_prefix_and_answer_as_its_processor_makes_them() -> None:
    _, processor = family("paligemma")
    images = ImageProcessing(processor)
    rows = [
        {"image": picture(i, *SIZES[i]), "prompt": f"<image>what is {i}", "completion": f"it is {i * 5}"}
        for i in range(3)
    ]
    theirs = processor(
        text=[row["prompt"] for row in rows], images=[[row["image"]] for row in rows],
        suffix=[row["completion"] for row in rows], padding=True, padding_side="right", return_tensors="pt",
    )  # fmt: skip
    ours = collated(images, rows)
    real = theirs["attention_mask"] == 1
    assert torch.equal(ours["token_type_ids"][real], theirs["token_type_ids"][real])
    for name in ("input_ids", "labels", "pixel_values", "attention_mask"):
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_no_image_is_cut(name: str) -> None:
    images = processing(name)
    row = conversation(3, 3, inline=True)
    whole = prepared(images, [row], assistant_only_loss=True).dataset[0]
    lengths = range(8, len(whole["input_ids"]), 3)
    cut = [found for most in lengths if (found := cut_to(most, images, row))]
    assert {len(found["images"]) for found in cut} == {1, 2, 3}
    for found in cut:
        ids = found["input_ids"]
        assert ids == whole["input_ids"][: len(ids)]
        # what is left are whole images, as many as the row has
        texts = [images.expanded(images.token, [image.size]).text for image in found["images"]]
        expected = sum(text.count(token_of(images)) for text in texts)
        assert sum(i in images.processor.image_token_ids for i in ids) == expected
    with pytest.raises(DataError, match=r"row 0: has \d+ tokens, more than max_length=20"):
        prepared(images, [row], max_length=20, truncation_mode="error")


def cut_to(most: int, images: ImageProcessing, row: Any) -> Any:
    """The row in so many tokens; None if none of them is trained."""
    try:
        (found,) = prepared(images, [row], max_length=most, assistant_only_loss=True).dataset
    except DataError as error:
        if "no row has a token to train on" not in str(error):
            raise
        return None
    assert len(found["input_ids"]) <= most
    return found


def token_of(images: ImageProcessing) -> str:
    return str(images.processor.tokenizer.convert_ids_to_tokens(images.processor.image_token_ids[0]))


def test_rows_of_other_forms_and_with_other_numbers_of_images() -> None:
    images = processing("llava")
    decode = images.processor.tokenizer.decode
    shown = "<image>" * 4
    llava = {
        "image": picture(0),
        "conversations": [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "A cat."},
        ],
    }
    ids = prepared(images, [llava]).dataset[0]["input_ids"]
    assert decode(ids) == f"USER: {shown}\n\nWhat? ASSISTANT: A cat.</s>"
    text = {"images": [picture(0), picture(1)], "text": "one <image> two <image>"}
    assert decode(prepared(images, [text]).dataset[0]["input_ids"]) == f"one {shown} two {shown}</s>"
    alpaca = {"image": picture(0), "instruction": "Say.", "output": "Yes."}
    assert (
        decode(prepared(images, [alpaca]).dataset[0]["input_ids"])
        == f"USER: {shown}\nSay. ASSISTANT: Yes.</s>"
    )
    with pytest.raises(
        DataError, match=r"row 1: has 1 images, and 2 places for images \('<image>'\) in its text"
    ):
        prepared(images, [text, {**text, "images": [picture(0)]}])
    placed = conversation(2, 1, inline=True)
    with pytest.raises(DataError, match=r"row 0: has 1 images in its columns, and 2 parts"):
        prepared(images, [{**placed, "images": placed["images"][:1]}])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grey_image_of_a_batch_without_any_changes_nothing_but_the_path(name: str) -> None:
    """The loss is that of the text alone, and the weights for images have a gradient, which is 0."""
    model, processor = family(name)
    images = ImageProcessing(processor)
    rows = [conversation(0, 1), conversation(0, 2)]
    batch = collated(images, rows, assistant_only_loss=True)
    assert "pixel_values" in batch
    bare = DataCollatorForCausalLM(processor.tokenizer.pad_token_id)(
        list(prepared(images, rows, assistant_only_loss=True).dataset)
    )
    assert int(bare["attention_mask"].sum()) == int(batch["attention_mask"].sum())
    ids = bare["input_ids"].numpy()
    kinds = images.kinds(ids, bare["labels"].numpy(), np.arange(ids.shape[1])[None] == 0)
    bare |= {key: torch.tensor(value) for key, value in kinds.items()}
    loss = model(**batch).loss
    torch.testing.assert_close(loss, model(**bare).loss, rtol=1e-6, atol=0)
    loss.backward()
    seeing = [weight.grad for key, weight in model.named_parameters() if "vision" in key or "visual" in key]
    assert seeing
    assert all(grad is None or not grad.any() for grad in seeing)
    assert any(grad is not None for grad in seeing)
