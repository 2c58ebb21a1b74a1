from __future__ import annotations

import pytest
import torch
from tests.finetuning.vision_families import family, picture
from torch import Tensor

from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.text.image_processing import ImageProcessing
from windlass.text.image_rows import ImageCollator
from windlass.transforms.document_attention import documents_apart


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", "paligemma"])
def test_documents_with_two_images_with_one_and_with_none_are_apart(name: str) -> None:
    """Logits and gradients of one row equal those of the documents alone, and the model is as it was at the end."""
    model, processor = family(name)
    model.eval()
    images = ImageProcessing(processor)
    _, tokens = images.grey()
    documents = [
        ([3, *tokens, 7, *tokens, 8, 9], 2),
        ([4, 5, 6, 7, 8], 0),
        ([5, 6, *tokens, 9, 10], 1),
    ]
    samples = [
        {
            "input_ids": ids,
            "labels": [-100] * (len(ids) - 2) + ids[-2:],
            "images": [picture(10 * at + number, 32, 32) for number in range(count)],
        }
        for at, (ids, count) in enumerate(documents)
    ]
    joined, alone = (
        ImageCollator(DataCollatorForCausalLM(0, joins), images, joins) for joins in (True, False)
    )

    def logits_of(batch: dict[str, Tensor]) -> Tensor:
        given = {key: value for key, value in batch.items() if key != "labels"}
        found: Tensor = model(**given).logits
        return found

    with documents_apart(model):
        whole = logits_of(joined(samples))
    # The batch of a document without an image has a grey one in its padding.
    parts = torch.cat(
        [logits_of(alone([sample]))[:, : len(sample["input_ids"])] for sample in samples], dim=1
    )
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)

    def gradients(logits: Tensor) -> list[Tensor]:
        weights = [weight for key, weight in model.named_parameters() if "language_model" in key]
        return list(torch.autograd.grad(logits.square().sum(), weights))

    for found, expected in zip(gradients(whole), gradients(parts), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_images_are_seen_whole_where_their_tower_gets_the_borders_of_documents(name: str) -> None:
    """As it does from models of transformers before 5.18."""
    model, processor = family(name)
    seen = processor.image_processor(images=[picture(0, 32, 32)], return_tensors="pt")
    grid, pixels = seen["image_grid_thw"], seen["pixel_values"]
    borders = torch.tensor([0, 3, 5], dtype=torch.int32)
    given = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 3, "max_length_k": 3}
    tower = model.model.visual.eval()
    with documents_apart(model):
        torch.testing.assert_close(tower(pixels, grid, **given)[0], tower(pixels, grid)[0])
