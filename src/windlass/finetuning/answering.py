"""Generate the answers to prompts, in batches that are divided among the ranks with different data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.core.rng import derive_seed, seed_generators
from windlass.dist.gang import Gang
from windlass.finetuning.answer_checks import new_tokens
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.text_generation import generate
from windlass.text.prompt_rows import PromptRow
from windlass.transforms.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` without special tokens; `tokens` counts all of them, the end token included."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """A model that answers."""

    model: Any  # a causal model of Transformers, or of peft around one
    device: torch.device  # of the model
    data_ranks: Gang  # the ranks that answer different prompts
    in_step: bool  # a forward is a collective, so ranks make equally many of them
    # The context of one batch, such as mixed precision
    context: Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Answering:
    """How prompts are answered: by the arguments, with the tokenizer, within the limits of the model."""

    args: SFTConfig
    tokenizer: Any
    limits: ModelLimits

    def __call__(self, rows: Sequence[PromptRow], writer: AnsweringModel) -> list[Answer]:
        """The answers to all rows, in their order, on every rank. Collective.

        The same rows are batched together on any number of ranks, and a batch has random numbers of its own.
        """
        size, ranks = self.args.eval_batch_size_of(writer.data_ranks.size), writer.data_ranks
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        rounds = -(-len(batches) // ranks.size)
        own: dict[int, list[Answer]] = {}
        for turn in range(rounds):
            number = turn * ranks.size + ranks.rank
            if number < len(batches):
                own[number] = self._answers(batches[number], number, writer)
            elif writer.in_step:  # the answers of another rank, which need this one
                self._answers(batches[-1], number, writer)
        sent = {number: [(answer.text, answer.tokens) for answer in part] for number, part in own.items()}
        found = {number: part for parts in ranks.gather_objects(sent) for number, part in parts.items()}
        return [Answer(*fields) for number in range(len(batches)) for fields in found[number]]

    def _answers(self, rows: Sequence[PromptRow], number: int, writer: AnsweringModel) -> list[Answer]:
        width = max(len(row.ids) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = [[pad] * (width - len(row.ids)) + row.ids for row in rows]
        seen = [[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows]
        inputs = {
            "input_ids": torch.tensor(ids, device=writer.device),
            "attention_mask": torch.tensor(seen, device=writer.device),
        }
        if self.args.generation_do_sample:
            seed = derive_seed(self.args.seed, number)
            seed_generators(seed)
            torch.manual_seed(seed & (2**63 - 1))
        config = self._config(writer.model, new_tokens(self.args, self.limits, width))
        with writer.context(), _caching(writer.model):
            made = generate(writer.model, inputs, generation_config=config, synced_gpus=writer.in_step)
        return [self._answer(row, config.eos_token_id) for row in made[:, width:].cpu()]

    def _config(self, model: Any, tokens: int) -> Any:
        config = copy.deepcopy(model.generation_config)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        config.eos_token_id = sorted({end for end in (*ends, self.tokenizer.eos_token_id) if end is not None})
        config.pad_token_id = self.tokenizer.pad_token_id
        config.max_new_tokens, config.max_length = tokens, None
        config.num_beams = self.args.generation_num_beams or 1
        config.do_sample = self.args.generation_do_sample
        if not config.do_sample:  # are of sampling, and warned of without it
            config.temperature = config.top_p = config.top_k = config.typical_p = None
        config.use_cache = True
        config.return_dict_in_generate = False
        return config

    def _answer(self, ids: Tensor, ends: Sequence[int]) -> Answer:
        tokens = ids.tolist()
        end = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return Answer(text.strip(), end)


@contextlib.contextmanager
def _caching(model: Any) -> Iterator[None]:
    """Use the cache of keys and values, which training turns off in the model's config."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is None:
        yield
        return
    config.use_cache = True  # type: ignore[union-attr]
    try:
        yield
    finally:
        config.use_cache = before  # type: ignore[union-attr]
