"""The one way in which trainers and commands prepare text: with the cache of the user, and a bar."""

from __future__ import annotations

from typing import Any

from windlass.callbacks.displays import Display, open_display
from windlass.core.world import world_from_environment
from windlass.finetuning.sft_config import SFTConfig
from windlass.text.forms import naming_dataset
from windlass.text.image_processing import ImageProcessing
from windlass.text.prepare_text import ENOUGH_FOR_WORKERS, PreparedText, prepare_text
from windlass.text.text_options import TextOptions
from windlass.text.token_store import TokenStore, default_cache


def text_options(
    args: SFTConfig, packing: bool, completion_only: bool | None, formatting_func: Any = None
) -> TextOptions:
    """Return what `SFTConfig` says on the preparation of one dataset.

    Args:
        packing: the rows are packed.
        completion_only: train on completions alone; see `sft_data.trains_on_completions`.
    """
    return TextOptions(
        dataset_text_field=args.dataset_text_field,
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        completion_only_loss=completion_only,
        assistant_only_loss=args.assistant_only_loss,
        formatting_func=formatting_func,
        packing=args.packing_strategy if packing else None,
        # Before and, by the trainer, after packing: documents of one row are not neighbours, nor are rows.
        shuffle_seed=args.seed if packing and args.shuffle_dataset else None,
        num_proc=args.dataset_num_proc,
    )


def prepare_kept(
    dataset: Any,
    tokenizer: Any,
    options: TextOptions,
    name: str,
    show_progress: bool = True,
    images: ImageProcessing | None = None,
    cache: TokenStore | None = None,
) -> PreparedText:
    """`prepare_text`, whose result is looked for in the cache of the user and kept there.

    No process group is needed: of several processes one prepares, and the others wait for its lock.

    Args:
        name: of the dataset, for errors and the bar, which is drawn for many rows, and only by a process that prepares
            them.
        images: what a processor makes of the rows' images; None: rows of text.
        cache: another one than that of the user.

    Raises:
        ConfigError, DataError: as `prepare_text`.
    """
    bar: list[Display] = []

    def advance(done: int, total: int) -> None:
        if (
            not bar
            and show_progress
            and total >= ENOUGH_FOR_WORKERS
            and world_from_environment().local_rank == 0
        ):
            bar.append(open_display(total, f"prepare {name}"))
        for display in bar:
            display.advance(done)

    try:
        with naming_dataset(name):
            return prepare_text(
                dataset, tokenizer, options, images=images, cache=cache or default_cache(), progress=advance
            )
    finally:
        for display in bar:
            display.close()
