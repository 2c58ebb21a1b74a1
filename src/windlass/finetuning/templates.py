"""Chat templates that a model takes over from another tokenizer or from a file."""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import at_home
from windlass.core.optional import require
from windlass.core.whole_file import read_text

_ENDINGS = (".jinja", ".j2")


def adopt_template(path: str | None, model: nn.Module, tokenizer: Any) -> list[int]:
    """Set the chat template of `tokenizer` from a Jinja file, or from the tokenizer in a folder or repository. Raises
    ConfigError if the file or tokenizer cannot be read.

    Returns:
        ids of the tokens that were added to the vocabulary; none for a file.
    """
    if path is None or path.endswith(_ENDINGS):
        take_over_template(path, tokenizer)
        return []
    return clone_chat_template(model, tokenizer, path)[2]


def take_over_template(path: str | None, tokenizer: Any) -> list[str]:
    """As `adopt_template`, for a tokenizer without its model. Return the names of the tokens that were added."""
    if path is None:
        return []
    if not path.endswith(_ENDINGS):
        return _take_over_tokenizer(path, tokenizer)
    try:
        tokenizer.chat_template = read_text(at_home(path))
    except OSError as error:
        raise ConfigError(Problem("chat_template_path", path, f"cannot be read: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem("chat_template_path", path, f"is not UTF-8: {error}")) from error
    return []


def _take_over_tokenizer(path: str, tokenizer: Any) -> list[str]:
    """Set template, end token and added tokens of the tokenizer at `path`; return the tokens that are new."""
    transformers = require("transformers", "read a chat template")
    try:
        source = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        fix = f"is neither a {' or '.join(_ENDINGS)} file nor a tokenizer: {error}"
        raise ConfigError(Problem("chat_template_path", path, fix)) from error
    if source.chat_template is None:
        raise ConfigError(Problem("chat_template_path", path, "its tokenizer has no chat template"))
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    return [token.content for token in added]


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Give `model` and its `tokenizer` the chat template, the end token and the added tokens of another tokenizer.

    Embeddings are resized to the tokens, to a multiple of `resize_to_multiple_of` unless it is None; rows beyond get
    tokens `<extra_id_0>`, `<extra_id_1>`, ... Raises ConfigError if the tokenizer cannot be loaded, or has no chat
    template.

    Args:
        source_tokenizer_path: name or folder of the tokenizer that has the template.

    Returns:
        the model, the tokenizer, and the ids of the tokens that were added to its vocabulary.
    """
    added = _take_over_tokenizer(source_tokenizer_path, tokenizer)
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if config is not None:
            config.eos_token_id = tokenizer.eos_token_id
    # To a multiple of 64 by default, because matrix products of other sizes are slow on tensor cores.
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    rows = model.get_input_embeddings().weight.shape[0]
    names = (f"<extra_id_{number}>" for number in count())
    while len(tokenizer) < rows:  # every row of the embedding has a token
        name = next(names)
        if tokenizer.add_tokens(name):
            added.append(name)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(added)
