"""What an `SFTTrainer` needs for datasets with images: the processor's part of it, and what contradicts images."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from windlass.config.refusal import refuse
from windlass.core.errors import Problem
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.tuned_model import TunedModel
from windlass.text.image_files import ImageFiles
from windlass.text.image_processing import ImageProcessing
from windlass.trainer.wrappers import innermost


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
    images = ImageProcessing(base.processing_class, files, takes)
    refuse(_problems_of_packing(images, args))
    return images


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


def _problems_of_packing(images: ImageProcessing, args: SFTConfig) -> Iterator[Problem]:
    if args.joins_rows:
        name = "padding_free" if args.padding_free else "packing"
        kind = type(images.processor).__name__
        fix = (
            f"rows with images of a {kind} are not joined yet; batches of similar lengths need little padding"
        )
        yield Problem(name, True, fix)
