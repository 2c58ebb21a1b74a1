"""Text that a trained model writes, printed as it is generated, for `windlass generate` and `windlass chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import ADAPTER_CONFIG
from windlass.cli.command_line import DTYPES
from windlass.config.sections.setting import SEED, Range, at_least
from windlass.core.errors import ConfigError, DataError, Problem, refuse
from windlass.core.optional import require
from windlass.core.output import STDOUT, escaped, say
from windlass.finetuning.text_generation import generate
from windlass.finetuning.trained_model import find_model, open_trained
from windlass.recipes.quiet import hide_loading_bars
from windlass.recipes.schema import RecipeParts
from windlass.recipes.tuning_data import ended_prompt
from windlass.text.chat_template import rendering

Message = dict[str, str]


class Writer:
    """Generates text with one model, and prints it as it appears.

    Attributes:
        tokenizer: of the model.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._most = options.max_new_tokens
        self._choice = _sampling(options)
        # Before the model is looked for: the import takes seconds, in which a run may remove its newest checkpoint.
        hide_loading_bars()
        name = find_model(options.model)
        if options.base is not None and not (Path(name) / ADAPTER_CONFIG).is_file():
            raise ConfigError(Problem("--base", options.base, f"{name} is not a folder with an adapter"))
        if name != options.model:
            say(f"{name}:", error=True)
        dtype = "auto" if options.dtype is None else getattr(torch, DTYPES[options.dtype])
        self._model, self.tokenizer = open_trained(name, options.base, dtype)
        # After the model is loaded: loading may draw numbers, such as those of weights that its file lacks.
        if options.seed is not None:
            torch.manual_seed(options.seed)

    def write(self, text: str, messages: Sequence[Message] = ()) -> str:
        """Print what the model writes after `text`, or as the next turn of `messages`, and return it. Ctrl-C raises
        KeyboardInterrupt; what was printed until then ends with a new line. Raises DataError if the prompt is empty,
        does not fit into the model's context, or is refused by the chat template.
        """
        device = next(self._model.parameters()).device
        is_encoder_decoder = bool(self._model.config.is_encoder_decoder)
        if messages:
            inputs = chat_tokens(self.tokenizer, messages)
        else:
            # A model does not continue a text after its end token, which an encoder reads.
            whole = is_encoder_decoder or not _ends_texts(self.tokenizer)
            inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=whole)
        inputs = inputs.to(device)
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise DataError("the prompt has no tokens; give a text")
        most = min(self._most, positions_left(self._model.config, length))
        if most < 1:
            raise DataError(f"the prompt has {length} tokens, which fill the model's context; shorten it")
        printed: Any = _printer(self.tokenizer, skip_prompt=not is_encoder_decoder)
        options: dict[str, Any] = {
            "max_new_tokens": most,
            "pad_token_id": self.tokenizer.pad_token_id,
            "num_return_sequences": 1,
            **self._choice,
        }
        try:
            with torch.no_grad():
                if options.get("num_beams", self._model.generation_config.num_beams or 1) == 1:
                    generate(self._model, inputs, streamer=printed, **options)
                else:
                    # Any beam may be the best until the end, so nothing can be printed before.
                    ids = generate(self._model, inputs, **options)[0, 0 if is_encoder_decoder else length :]
                    printed.on_finalized_text(self.tokenizer.decode(ids, skip_special_tokens=True))
        finally:
            say()
        return str(printed.text)


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> Any:
    """Return the messages in the tokenizer's chat template, up to the beginning of the next turn, as a batch of one.
    Raises DataError if the template cannot render them.
    """
    with rendering():
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )


def _ends_texts(tokenizer: Any) -> bool:
    """Return True if the tokenizer adds an end token to a text, after which a model does not continue it."""
    end = tokenizer.eos_token_id
    return end is not None and tokenizer("a")["input_ids"][-1:] == [end]


def positions_left(config: Any, used: int) -> int:
    """Return how many tokens a model can add to a prompt of `used` tokens."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None:
        return sys.maxsize
    left = int(most) - used
    # An encoder reads the prompt; the text begins with a token of its own at the first position of the decoder.
    return int(most) - 1 if config.is_encoder_decoder and left >= 0 else left


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate` that were chosen; those of the model are its defaults. Chosen tokens are those
    of one text, whatever number of beams the model searches by default.
    """
    share = Range(lambda number: 0 < number <= 1, "must be above 0 and at most 1")
    rules = (
        ("max_new_tokens", at_least(1)),
        ("temperature", at_least(0)),
        ("top_p", share),
        ("top_k", at_least(1)),
        ("seed", SEED),
    )
    given = ((f"--{name.replace('_', '-')}", getattr(options, name), rule) for name, rule in rules)
    refuse(
        Problem(name, value, fault)
        for name, value, rule in given
        if value is not None and (fault := rule.fault(value)) is not None
    )
    if options.temperature == 0:
        return {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    chosen = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return {"do_sample": True, "num_beams": 1, **chosen} if chosen else {}


def _printer(tokenizer: Any, *, skip_prompt: bool) -> Any:
    """Return a streamer of transformers that prints text without control characters, and keeps it as `text`."""
    streamer: Any = require("transformers", "generate text").TextStreamer

    class Printer(streamer):  # type: ignore[misc]
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            STDOUT.write(escaped(text))
            STDOUT.flush()

    made: Any = Printer
    return made(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)


# Of both texts, so that only the training differs.
SAMPLE_SEED = 0


def continue_prompt(parts: RecipeParts, trainer: Any) -> str | None:
    """Return `sample.prompt` continued by the model, or its answer to it, on one line; None if there is no prompt."""
    sample, tokenizer, model = parts.recipe.sample, parts.tokenizer, trainer.model
    if not sample.prompt:
        return None
    answers = parts.takes_turns and tokenizer.chat_template is not None
    if answers:
        prompt = chat_tokens(tokenizer, [{"role": "user", "content": sample.prompt}])
    else:
        text = ended_prompt(sample.prompt, parts.recipe.data)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    device = next(model.parameters()).device
    length = prompt["input_ids"].shape[1]
    most = min(sample.max_new_tokens, positions_left(model.config, length))
    if most < 1:
        return None
    choice: dict[str, Any] = {"do_sample": False}
    if sample.temperature:
        choice = {"do_sample": True, "temperature": sample.temperature, "top_k": 0}
    was_training = model.training
    # In mixed precision as it is trained: a base of few bits has layers of two dtypes.
    with trainer.generating(), trainer.compute_loss_context_manager():
        torch.manual_seed(SAMPLE_SEED)
        ids = generate(
            model, prompt.to(device), max_new_tokens=most, pad_token_id=tokenizer.pad_token_id, **choice
        )[0]
    model.train(was_training)
    # Of a text all of it, because the blank before a word is decoded with the word before it.
    text = tokenizer.decode(ids[length:] if answers else ids, skip_special_tokens=True)
    return " ".join((f"{sample.prompt} {text}" if answers else text).split())
