"""The models and the data of combinations: two small language models of tokens, and rows of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tests.finetuning.vision_families import picture
from torch import Tensor, nn
from torch.utils.data import IterableDataset

VOCABULARY, PADDING, NO_TARGET = 32, 0, -100
TRAIN_ROWS, EVAL_ROWS = 40, 10  # in updates of 12: four an epoch, the last one of 4
LENGTH = 6


class Block(nn.Module):
    """One of the layers that repeat."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Experts(nn.Module):
    """The experts of a layer, which ranks may divide."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, width, width) / width)

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.einsum("tw,tkwv->tkv", states, self.weight[chosen])
        return (made * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Adds what two experts of four make of a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), Experts(4, width)

    def forward(self, hidden: Tensor) -> Tensor:
        states = hidden.flatten(0, -2)
        weights, chosen = self.router(states).softmax(-1).topk(2)
        return hidden + self.experts(states, chosen, weights).view_as(hidden)


class Plain(nn.Module):
    """A module of a script's own. A token's label is at its own place: nothing is shifted.

    Args:
        experts: a mixture of them follows the layers.
    """

    def __init__(self, dropout: float = 0.0, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([Block(16, dropout) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)
        self.tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"}
        self.dummy_inputs = {"input_ids": torch.arange(8)[None]}
        self.mixture = Mixture(16) if experts else None
        self.ep_plan = {"mixture.experts": "ep_dispatch_experts", "mixture.experts.weight": "grouped_gemm"}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.mixture is not None:
            hidden = self.mixture(hidden)
        logits = self.head(hidden)
        found = {"logits": logits}
        if labels is not None:
            found = {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), **found}
        return found


def llama(dropout: float = 0.0, experts: bool = False) -> nn.Module:
    """A model of transformers whose keys and values are smaller than its queries; with experts, one of Mixtral."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    kind, config = (MixtralForCausalLM, MixtralConfig) if experts else (LlamaForCausalLM, LlamaConfig)
    return kind(
        config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
            pad_token_id=PADDING,
            bos_token_id=None,
            eos_token_id=1,
            **({"num_local_experts": 4, "router_aux_loss_coef": 0.0} if experts else {}),
        )
    )


@functools.cache
def tokenizer() -> Any:
    """Of the words `2`, `3`, ..., one for each token of the vocabulary."""
    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PADDING, "<eos>": 1, **{str(i): i for i in range(2, VOCABULARY)}}
    inner = tk.Tokenizer(tk.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def row(index: int, ragged: bool) -> dict[str, list[int]]:
    """A sample: its tokens count up from a random start, and some of the first have no label."""
    draws = torch.Generator().manual_seed(index)
    length = LENGTH - 2 + index % 5 if ragged else LENGTH
    start = int(torch.randint(VOCABULARY, (), generator=draws))
    tokens = [2 + (start + 3 * i) % (VOCABULARY - 2) for i in range(length)]
    unlabelled = index % 3 if ragged else 0
    labels = [NO_TARGET] * unlabelled + [2 + (token + 1) % (VOCABULARY - 2) for token in tokens[unlabelled:]]
    return {"input_ids": tokens, "labels": labels}


def training_rows(ragged: bool) -> list[dict[str, list[int]]]:
    return [row(index, ragged) for index in range(TRAIN_ROWS)]


def evaluation_rows(ragged: bool) -> list[dict[str, list[int]]]:
    return [row(1000 + index, ragged) for index in range(EVAL_ROWS)]


def pairs(rows: Sequence[dict[str, list[int]]]) -> list[dict[str, str]]:
    """Preferences: of each row the first two tokens are a prompt, and its end is better than that of the next row."""
    texts = [[str(token) for token in row["input_ids"]] for row in rows]
    return [
        {
            "prompt": " ".join(own[:2]),
            "chosen": " " + " ".join(own[2:]),
            "rejected": " " + " ".join(other[1:]),
        }
        for own, other in zip(texts, [*texts[1:], texts[0]], strict=True)
    ]


def conversations(rows: Sequence[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """The rows as questions with answers, two of three on an image."""
    found = []
    for number, one in enumerate(rows):
        texts = [str(token) for token in one["input_ids"]]
        asked, answered = " ".join(texts[:2]), " ".join(texts[2:])
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        found.append({"images": [picture(number)] if number % 3 else [], "messages": said})
    return found


def pad(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return tensors (rows, longest row) of int64."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    return {"input_ids": filled("input_ids", PADDING), "labels": filled("labels", NO_TARGET)}


def of_datasets(ragged: bool, stream: bool) -> Any:
    """The rows as the package `datasets` has them; as a stream, three times over."""
    from datasets import Dataset

    rows = training_rows(ragged)
    return Dataset.from_list(3 * rows).to_iterable_dataset() if stream else Dataset.from_list(rows)


class Stream(IterableDataset[dict[str, Any]]):
    """Rows without a length, three times over."""

    def __init__(self, ragged: bool) -> None:
        self._ragged = ragged

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row(index, self._ragged) for index in range(3 * TRAIN_ROWS))


class StatefulStream(IterableDataset[dict[str, Any]]):
    """The same, entered where it was left."""

    def __init__(self, ragged: bool) -> None:
        self._ragged, self._next = ragged, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < 3 * TRAIN_ROWS:
            self._next += 1
            yield row(self._next - 1, self._ragged)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
