"""What a model declares about its inputs: the tokens, positions and classes that it has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.module_state import without_adapters
from windlass.core.types import IGNORED
from windlass.transforms.evaluating import vocabulary_of

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits that a model of transformers declares; None where it declares none."""

    tokens: int | None = None  # rows of the embedding of its input
    # What a label may count to: `num_labels` of a classifier, the vocabulary of a language model
    classes: int | None = None
    is_classifier: bool = False  # a label is a class, not a token
    positions: int | None = None  # tokens that a row may have
    # The positions are a table, so a longer row fails; other models compute them, and only were not trained on longer
    # rows
    positions_learned: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> ModelLimits:
        """Read the limits of a model, of the base model if it has an adapter."""
        model = without_adapters(model)
        config = getattr(model, "config", None)
        if config is None:
            return cls()
        tokens = vocabulary_of(model)
        is_classifier = str(getattr(model, "loss_type", "")).endswith("Classification")
        classes = _classes(config) if is_classifier else _output_tokens(model)
        positions = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
        if not isinstance(positions, int) or positions <= 0:
            return cls(tokens, classes, is_classifier)
        tables = [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
            and ("position" in name or name.endswith("wpe"))
            and module.num_embeddings >= positions
        ]
        # Models after RoBERTa count positions from behind the padding, whose rows no token gets.
        exact = [table.padding_idx for table in tables if table.num_embeddings == positions]
        padding = max((index + 1 for index in exact if index is not None), default=0)
        return cls(tokens, classes, is_classifier, positions - padding, bool(tables))

    def check_rows(
        self,
        name: str,
        largest_id: int,
        longest: tuple[int, str],
        max_length: int | None,
        prompt: tuple[int, str] = (0, ""),
    ) -> None:
        """Check the tokens and the longest row of a prepared dataset. Raises DataError for a token without an
        embedding, and for a prompt that leaves no position for an answer; ConfigError for a row that is longer than a
        table of positions; warns of one if the model computes its positions.

        Args:
            name: of the dataset.
            longest: tokens of the longest row, and its place, such as a file and a line.
            max_length: the argument that limits rows, for messages.
            prompt: tokens of the longest prompt, and its place.
        """
        if self.tokens is not None and largest_id >= self.tokens:
            raise DataError(
                f"the {name} dataset has the token {largest_id}, and the embedding of the model has {self.tokens} "
                "rows: use the model's own tokenizer, or call "
                f"model.resize_token_embeddings({largest_id + 1})"
            )
        positions = self.positions
        if positions is None:
            return
        if prompt[0] >= positions:
            raise DataError(
                f"{prompt[1]}: the prompt has {prompt[0]} tokens, and the model has {positions} positions "
                f"(max_position_embeddings), so that none is left for an answer: shorten the prompt, remove the row, "
                f"or set max_length={positions}, which leaves such rows out"
            )
        if longest[0] <= positions:
            return
        tokens, place = longest
        where = f" ({place})" if place else ""
        fix = (
            f"the longest row of the {name} dataset{where} has {tokens} tokens, and the model has {positions} "
            f"positions (max_position_embeddings): set max_length={positions}, or take a model that was made for "
            "longer rows"
        )
        # A table has no row for a later position, and the forward fails; computed positions go on, only untrained.
        if self.positions_learned:
            raise ConfigError(Problem("max_length", max_length, fix))
        logger.warning("max_length=%s: %s", max_length, fix)


def ignored_pixel(model: nn.Module) -> int:
    """The label of a pixel that the model's own loss leaves out: -100, unless a configuration of transformers has
    another one. Classifiers of images have it too, for whose labels it is a class like any other.
    """
    config = getattr(model, "config", None)  # of a wrapper, too: those of peft have it
    found = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", None))
    return found if isinstance(found, int) else IGNORED


def _output_tokens(model: nn.Module) -> int | None:
    """The tokens that a language model predicts; None for other models."""
    head = getattr(model, "get_output_embeddings", None)
    return getattr(head(), "out_features", None) if callable(head) else None


def _classes(config: object) -> int | None:
    """The classes of a classifier; None if its labels are numbers, or several for each row."""
    count = getattr(config, "num_labels", None)
    kind = getattr(config, "problem_type", None)
    is_one = isinstance(count, int) and count > 1 and kind in (None, "single_label_classification")
    return count if is_one else None
