"""Supervised fine-tuning: `SFTTrainer` prepares the rows, and may train an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.config.arguments import TrainingArguments
from windlass.finetuning.sft_config import SFTConfig
from windlass.recipes.arranged_rows import columns_of, formats_of
from windlass.recipes.built_in_recipes import CHAT, ROWS
from windlass.recipes.schema import DIGITS, PLAIN_TEXT, STREAMED, DataSpec, Recipe, RecipeParts, format_of
from windlass.recipes.task import Conflict, Task, tuning_conflicts
from windlass.text.forms import ROLES

if TYPE_CHECKING:
    from windlass.recipes.tuning_data import DataSource


class SupervisedTuning(Task):
    """A named model, or a small base that is trained first, learns completions, conversations or text."""

    name = "sft"
    own_keys = (
        "data.prompt_column",
        "data.completion_column",
        "data.mixture",
        "data.streaming",
        "data.eval_rows",
        "data.prompt_format",
        "data.rename",
        "data.messages",
        "base",
        "adapter",
        "quantization",
        "sample",
    )
    own_formats = (*PLAIN_TEXT, DIGITS)
    arguments = SFTConfig
    new_model = "base"
    provable = True

    def stand_in(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if data.get("prompt_column"):
            return {"train": str(ROWS), "prompt_column": "text", "completion_column": "target"}
        return {"train": str(ROWS if data.get("text_column") else CHAT)}

    def training_defaults(self, recipe: Recipe) -> dict[str, Any]:
        return {"dataset_text_field": recipe.data.text_column}

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        data = recipe.data
        if data.streaming:
            yield from _stream_conflicts(recipe)
        elif data.eval_rows is not None:
            yield (
                "data.eval_rows",
                data.eval_rows,
                "is for streams; set data.streaming, or data.eval_fraction",
            )
        formats = formats_of(data)
        if formats and data.prompt_column is not None:
            fix = "is a part of data.prompt_format; name only one of the two"
            yield "data.prompt_column", data.prompt_column, fix
        has_prompt = data.prompt_column is not None or bool(formats)
        if has_prompt != (data.completion_column is not None):
            missing = "completion_column" if has_prompt else "prompt_column"
            fix = "prompts and completions need a column each; name both or neither"
            yield f"data.{missing}", None, fix
        for text in formats:
            try:
                columns_of(text)
            except ValueError as error:
                yield "data.prompt_format", text, f"{error}; write {{{{ for a brace that is text"
        for theirs, role in (data.messages.roles or {} if data.messages else {}).items():
            if role not in ROLES:
                fix = f"is not a role; known: {', '.join(sorted(ROLES))}"
                yield f"data.messages.roles.{theirs}", role, fix
        yield from tuning_conflicts(recipe)

    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        from windlass.recipes.fine_tuning import build_adapter
        from windlass.recipes.tuning_data import load_tuning_data, takes_turns

        build_adapter(recipe)  # its errors come before the data is read and a base is trained
        found = load_tuning_data(recipe, args.seed, saved_tokenizer)
        return replace(found, takes_turns=takes_turns(found.train, recipe.data.text_column))

    def build_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        from windlass.recipes.fine_tuning import build_sft_trainer

        return build_sft_trainer(parts, args)

    def text_source(self, recipe: Recipe) -> DataSource:
        from windlass.recipes.tuning_data import tuning_source

        return tuning_source(recipe, self.arguments(**recipe.training))


def _stream_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    data, steps = recipe.data, recipe.training.get("max_steps", -1)
    if data.mixture:
        yield "data.mixture", data.mixture, "is not read as a stream; name one source as data.train"
    elif data.train and (kind := format_of(data.train, data)) not in STREAMED:
        fix = f"{kind} is not read as a stream, which is {', '.join(STREAMED)}; leave it out"
        yield "data.streaming", True, fix
    if data.eval_fraction not in (DataSpec().eval_fraction, 0):
        fix = "a stream has no length to hold out a share of; set data.eval_rows, or data.eval"
        yield "data.eval_fraction", data.eval_fraction, fix
    if data.eval_rows is not None and (data.eval or data.eval_split):
        yield (
            "data.eval_rows",
            data.eval_rows,
            "holds out rows beside data that is named; leave one of the two out",
        )
    for key in ("prompt_column", "prompt_format", "rename", "messages"):
        if (value := getattr(data, key)) is not None:
            fix = "columns of a stream are not renamed: call them prompt and completion or messages; leave this out"
            yield f"data.{key}", value, fix
    if not isinstance(steps, int) or steps < 1:
        yield "training.max_steps", steps, "a stream has no length; set the number of updates"
