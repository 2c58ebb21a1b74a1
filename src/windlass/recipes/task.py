"""A kind of task, as recipes know it: what differs from other kinds, in one object.

Files of tasks import torch, trainers and datasets inside methods, because reading a recipe needs none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.callbacks.report import ReportCallback
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import REPORT
from windlass.core.output import shown
from windlass.recipes.built_in_recipes import ROWS
from windlass.recipes.marked_text import Marks
from windlass.recipes.quiet import hide_loading_bars
from windlass.recipes.schema import Recipe, RecipeParts
from windlass.recipes.text_metrics import ACCURACY
from windlass.text.trained_pieces import decoded

if TYPE_CHECKING:
    from windlass.recipes.tuning_data import DataSource

Conflict = tuple[str, object, str]  # dotted key, value, fix


class Task(ABC):
    """One kind of task. Subclasses are registered in `windlass.recipes.tasks`."""

    name: ClassVar[str]  # value of the key `task`
    # Dotted keys that this task reads, and not every task does. A key that any task lists here is refused for tasks
    # that do not list it.
    own_keys: ClassVar[tuple[str, ...]] = ()
    own_formats: ClassVar[tuple[str, ...]] = ()  # the same for values of `data.format`
    # What marks around tokens mean in `sample_lines`; empty if it marks none
    marked_tokens: ClassVar[str] = ""
    arguments: ClassVar[type[TrainingArguments]] = TrainingArguments  # class of the section `training`
    trainer: ClassVar[str] = "windlass.trainer.trainer:Trainer"  # its class, imported when it is opened
    measures_accuracy: ClassVar[bool] = False
    # A section `data` with rows that are always here
    rows_at_hand: ClassVar[Mapping[str, str]] = {"train": str(ROWS)}
    new_model: ClassVar[str] = "model"  # section whose `config` describes new weights
    reads_text: ClassVar[bool] = True  # samples are made by a tokenizer
    writes: ClassVar[bool] = False  # the model learns to write text, each token after those before it
    provable: ClassVar[bool] = False  # `windlass prove` compares its layouts with one process

    # --- the recipe -----------------------------------------------------------------------------------------------

    def training_defaults(self, recipe: Recipe) -> dict[str, Any]:
        """Return values of the section `training` that follow from other sections."""
        return {}

    def file_problem(self, kind: str) -> str | None:
        """Return why this task cannot read files of the format `kind`, or None."""
        return None

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield contradictions between the keys that this task reads."""
        yield from model_conflicts(recipe)

    def stand_in(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a section `data` that replaces `data` in the tiny form of a recipe."""
        return dict(self.rows_at_hand)

    # --- the run --------------------------------------------------------------------------------------------------

    @abstractmethod
    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        """Read and encode the data of `recipe`. Raises DataError, ConfigError or ModelError, with the file, the line or
        the key. `saved_tokenizer`: checkpoint with the tokenizer of a resumed run.
        """

    def build_model(self, parts: RecipeParts) -> Any:
        """Return the model; see `modelling.build_model`."""
        raise NotImplementedError

    def collator(self, parts: RecipeParts, model: Any) -> Any:
        """Return the function that makes a batch of a list of samples."""
        from windlass.data.collate_pad import default_data_collator

        return default_data_collator

    def trainer_options(self, parts: RecipeParts, args: TrainingArguments) -> dict[str, Any]:
        """Return arguments that only this task's trainer is given, such as `compute_metrics`."""
        return ACCURACY if self.measures_accuracy else {}

    def trainer_class(self) -> Any:
        return resolve_name(self.trainer)

    def open_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        """Return the trainer, which writes a report into its output folder."""
        hide_loading_bars()
        trainer = self.build_trainer(parts, args)
        if REPORT not in (args.report_to or ()):
            trainer.add_callback(ReportCallback())
        return trainer

    def build_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        """Return the trainer of new weights (seeded by `args.seed`) or those of the named model."""
        from windlass.core.rng import set_seed

        # New weights depend on the seed alone, and not on what drew random numbers while the data was read.
        set_seed(args.seed)
        model = self.build_model(parts)
        return self.trainer_class()(
            model=model,
            args=args,
            data_collator=self.collator(parts, model),
            train_dataset=parts.train,
            eval_dataset=parts.evaluation,
            processing_class=parts.tokenizer,
            **self.trainer_options(parts, args),
        )

    # --- windlass data ----------------------------------------------------------------------------------------------

    def text_source(self, recipe: Recipe) -> DataSource | None:
        """Return the text that the trainer prepares, and that can be prepared before; None if samples are made when
        training starts.
        """
        return None

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        """Yield the lines that `windlass data show` prints of one sample of `parts`: what the model gets. `marks`:
        printed around tokens that are trained on.
        """
        for name, value in sample.items():
            is_tokens = parts.tokenizer is not None and hasattr(value, "__len__")
            yield f"{name:<8}{decoded(value, parts.tokenizer) if is_tokens else shown(str(value))}"


def model_conflicts(recipe: Recipe, *, reads_text: bool = True) -> Iterator[Conflict]:
    """Yield what is wrong with the sections `model` and `tokenizer`, for a model that is new or loaded by name."""
    model, tokenizer = recipe.model, recipe.tokenizer
    if (model.name is None) == (model.config is None):
        given = "both" if model.name is not None else "neither"
        yield "model", given, "give one: model.name (a pretrained model) or model.config (a new one)"
    if model.config is not None and not isinstance(kind := model.config.get("model_type"), str):
        yield "model.config.model_type", kind, "set the kind of model: llama, bert, gpt2, ..."
    if reads_text and tokenizer.name is None and tokenizer.train is None and model.name is None:
        yield "tokenizer", "neither", "a new model needs tokenizer.train (a new one) or tokenizer.name"


def tuning_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Yield contradictions between the keys of a task that tunes a trained model."""
    if recipe.model.config is not None:
        fix = "names new weights, which cannot be tuned; give model.name, or base.config for a base to train first"
        yield "model.config", recipe.model.config, fix
    if recipe.quantization is not None and recipe.adapter is None:
        fix = "weights of few bits are not trained themselves; add an adapter, such as adapter={r: 8}"
        yield "quantization", recipe.quantization, fix
