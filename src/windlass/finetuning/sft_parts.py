"""What an `SFTTrainer` is made of beside its model: its arguments, its collator, and what it does with images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError, Problem, refuse, unknown
from windlass.core.logs import warn_of_argument
from windlass.core.types import IGNORED
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.tuned_model import TunedModel, begin_tuning
from windlass.text.image_files import ImageFiles
from windlass.text.image_processing import ImageProcessing
from windlass.text.image_rows import ImageCollator
from windlass.trainer.wrappers import innermost
from windlass.transforms.evaluating import evaluating


def open_images(base: TunedModel, args: SFTConfig, formatted: bool) -> ImageProcessing:
    """Return what the processor makes of images.

    Args:
        formatted: the script passed `formatting_func`.

    Raises:
        ConfigError: the processor has no images, or an argument contradicts them.
    """
    refuse(_problems(base, args, formatted))
    options = args.dataset_kwargs if isinstance(args.dataset_kwargs, dict) else {}
    files = ImageFiles(allow_urls=bool(options.get("allow_image_urls")))
    takes = inspect.signature(innermost(base.model).forward).parameters
    return ImageProcessing(base.processing_class, files, takes)


def _problems(base: TunedModel, args: SFTConfig, formatted: bool) -> Iterator[Problem]:
    if getattr(base.processing_class, "image_processor", None) is None:
        kind = type(base.processing_class).__name__
        fix = (
            "the dataset has images, which need a processor: pass AutoProcessor.from_pretrained(...) of a model that "
            "sees images"
        )
        yield Problem("processing_class", kind, fix)
    if args.truncation_mode == "keep_end":
        fix = "would remove the images, which come first; use 'keep_start' or 'error'"
        yield Problem("truncation_mode", "keep_end", fix)
    if formatted:
        fix = "returns text, which has no images; give rows with messages, or prompt and completion"
        yield Problem("formatting_func", "given", fix)
    if (args.packing or args.packs_evaluation) and args.packing_strategy != "bfd":
        fix = "would cut rows, and images with them; use 'bfd'"
        yield Problem("packing_strategy", args.packing_strategy, fix)


def refuse_unequal(model: nn.Module, images: ImageProcessing) -> None:
    """Raise if a row of two documents with images has other logits than the documents alone, as where positions of
    images depend on what is before them. To be called within `documents_apart`, on a model that is not yet wrapped.

    Raises:
        ModelError: it has, or the model fails on such a row.
    """
    grey, tokens = images.grey()
    # Images of noise, for what is seen of an equal one changes nothing.
    draw = np.random.default_rng(0)
    noise = [draw.integers(0, 256, (*reversed(grey.size), 3), dtype=np.uint8) for _ in range(2)]
    documents = [[*range(1, 1 + before), *tokens, *range(10, 16 - before)] for before in (4, 2)]
    samples = [
        {"input_ids": ids, "labels": [IGNORED] * (len(ids) - 4) + ids[-4:], "images": [image]}
        for ids, image in zip(documents, noise, strict=True)
    ]
    joined, alone = (
        ImageCollator(DataCollatorForCausalLM(0, joins), images, joins) for joins in (True, False)
    )
    try:
        with evaluating(model):
            whole = _logits(model, joined(samples))
            parts = torch.cat([_logits(model, alone([sample])) for sample in samples], dim=1)
    except Exception as error:  # of a model that does not take such a row
        raise ModelError(_reason(model, f"{type(error).__name__}: {error}")) from error
    difference, scale = (whole - parts).abs().max().item(), parts.abs().max().item()
    if not difference <= 64 * torch.finfo(parts.dtype).eps * scale:
        raise ModelError(
            _reason(model, f"logits differ by {difference:.2g} from those of rows alone, up to {scale:.2g}")
        )


def _reason(model: nn.Module, found: str) -> str:
    return (
        f"{type(innermost(model)).__name__} does not keep documents with images apart in one row ({found}). Train it "
        "without packing and padding_free; batches of similar lengths (train_sampling_strategy='group_by_length') need "
        "little padding."
    )


def _logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    device = next(model.parameters()).device
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    found: Tensor = model(**{name: value for name, value in given.items() if name != "labels"}).logits
    return found


# Keywords that the constructor of earlier versions of TRL took -> the fields of `SFTConfig` that replaced them.
_EARLIER = {
    **SFTConfig.EARLIER_NAMES,
    **{
        name: name
        for name in (
            "dataset_text_field",
            "packing",
            "eval_packing",
            "dataset_num_proc",
            "dataset_kwargs",
            "model_init_kwargs",
            "neftune_noise_alpha",
        )
    },
}


def sft_arguments(args: object, model: Any, train_dataset: Any, earlier: dict[str, Any]) -> SFTConfig:
    """Return the arguments as `SFTConfig`, after a check of the training dataset.

    Args:
        args: an `SFTConfig`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder
            named after the model.
        earlier: keywords of the constructor in earlier versions, which replace values of `args`.

    Raises:
        ConfigError: another type, or an unknown keyword.
    """
    return begin_tuning(SFTConfig, args, model, train_dataset, _checked(earlier))


def _checked(earlier: dict[str, Any]) -> dict[str, Any]:
    kinds = {name: type(value).__name__ for name, value in earlier.items()}
    refuse(unknown(kinds, _EARLIER, what="SFTTrainer has no such argument"))
    if earlier:
        fields = ", ".join(f"{_EARLIER[name]}={value!r}" for name, value in earlier.items())
        warn_of_argument(f"arguments of SFTTrainer that are now in SFTConfig: use SFTConfig({fields})")
    return {_EARLIER[name]: value for name, value in earlier.items()}


def sft_collator(
    given: Callable[[list[Any]], Any] | None,
    base: TunedModel,
    args: SFTConfig,
    images: ImageProcessing | None,
) -> Callable[[list[Any]], Any]:
    """Return the collator that a script passed, or the one of the arguments; with images, around it."""
    collator = given or DataCollatorForCausalLM(
        base.tokenizer.pad_token_id, args.joins_rows, pad_to_multiple_of=args.padding_step
    )
    return collator if images is None else ImageCollator(collator, images, args.joins_rows)
