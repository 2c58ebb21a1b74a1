"""What cannot be honoured of the settings of answers, before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from windlass.core.errors import Problem, refuse
from windlass.finetuning.sft_config import SFTConfig
from windlass.metrics.answer_scores import require_packages
from windlass.text.located_rows import RowError
from windlass.text.prompt_rows import PromptRow
from windlass.transforms.model_limits import ModelLimits

PROMPTS = "prompts"  # the set of `eval_prompts`
DEFAULT_NEW_TOKENS = 128
_ABOUT_ANSWERS = (
    "eval_prompts_limit",
    "generation_max_length",
    "generation_max_new_tokens",
    "generation_num_beams",
    "generation_do_sample",
)


def check_answers(
    args: SFTConfig, model: nn.Module, eval_dataset: Any, *, with_images: bool, formatted: bool, scored: bool
) -> None:
    """Raise ConfigError with everything that cannot be honoured.

    Args:
        formatted: the script passed `formatting_func`.
        scored: the script passed `compute_metrics`.
    """
    refuse([*_idle_settings(args), *_unanswerable(args, model, eval_dataset, with_images, formatted, scored)])
    require_packages(args.eval_metrics)


def answers_anything(args: SFTConfig) -> bool:
    """Return True if evaluations generate text."""
    return args.predict_with_generate or args.eval_prompts is not None


def _idle_settings(args: SFTConfig) -> Iterator[Problem]:
    if args.generation_max_length is not None and args.generation_max_new_tokens is not None:
        fix = "limits the same as generation_max_new_tokens; set only one"
        yield Problem("generation_max_length", args.generation_max_length, fix)
    if answers_anything(args):
        return
    for name in (*_ABOUT_ANSWERS, "eval_metrics"):
        if getattr(args, name):
            fix = "is of generated answers, and none are generated: set predict_with_generate=True, or eval_prompts"
            yield Problem(name, getattr(args, name), fix)


def _unanswerable(
    args: SFTConfig, model: nn.Module, eval_dataset: Any, with_images: bool, formatted: bool, scored: bool
) -> Iterator[Problem]:
    if not answers_anything(args):
        return
    asked: tuple[str, Any] = ("predict_with_generate", True)
    if not args.predict_with_generate:
        asked = ("eval_prompts", args.eval_prompts)
    if not callable(getattr(model, "generate", None)):
        yield Problem(*asked, f"needs a model with a `generate` method, and {type(model).__name__} has none")
    if with_images:
        yield Problem(*asked, "answers to rows with images are not generated; leave it out")
    if eval_dataset is None:
        yield Problem(*asked, "answers are generated in evaluations: pass eval_dataset")
    if isinstance(eval_dataset, Mapping) and PROMPTS in eval_dataset and args.eval_prompts is not None:
        fix = f"are logged as the set {PROMPTS!r}, which eval_dataset has too: name that one differently"
        yield Problem("eval_prompts", args.eval_prompts, fix)
    if formatted and args.predict_with_generate:
        fix = "formatting_func makes one text of a row, which has no prompt: apply it before, or use eval_prompts"
        yield Problem("predict_with_generate", True, fix)
    if args.predict_with_generate and not (args.eval_metrics or scored):
        fix = "the answers are not scored: set eval_metrics, such as ['exact_match'], or pass compute_metrics"
        yield Problem("predict_with_generate", True, fix)
    if args.predict_with_generate and (args.batch_eval_metrics or args.include_for_metrics):
        name = "batch_eval_metrics" if args.batch_eval_metrics else "include_for_metrics"
        fix = "compute_metrics gets the texts of a whole set, with predictions, label_ids and inputs; leave it out"
        yield Problem(name, getattr(args, name), fix)


def check_lengths(args: SFTConfig, limits: ModelLimits, rows: list[PromptRow]) -> None:
    """Raise RowError for a prompt that leaves no room for an answer of the configured length."""
    room = args.generation_max_new_tokens or 1
    ends = [
        (limits.positions, "the positions of the model"),
        (args.generation_max_length, "generation_max_length"),
    ]
    for most, name in ends:
        for row in rows:
            if most is not None and len(row.ids) + room > most:
                raise RowError(
                    row.number,
                    f"a prompt of {len(row.ids)} tokens and an answer of {room} are more than {name} ({most}): shorten "
                    "the prompt, or change the generation arguments",
                )


def new_tokens(args: SFTConfig, limits: ModelLimits, width: int) -> int:
    """The largest number of tokens of the answers to prompts of `width` tokens."""
    wanted = args.generation_max_new_tokens or DEFAULT_NEW_TOKENS
    if args.generation_max_length is not None:
        wanted = args.generation_max_length - width
    return wanted if limits.positions is None else min(wanted, limits.positions - width)
