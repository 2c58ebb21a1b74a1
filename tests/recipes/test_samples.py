"""Tokenizers, blocks and models that a recipe builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from windlass.core.errors import ConfigError, DataError
from windlass.core.types import IGNORED
from windlass.recipes.samples import Blocks, encode_labelled, pack
from windlass.recipes.schema import DataSpec, ModelSpec, Recipe, RecipeParts, TokenizerSpec, TokenizerTraining
from windlass.recipes.tasks import TASKS
from windlass.recipes.tokenizing import CLASSIFIER, WRITER, build_tokenizer

TEXTS = ["the cat sat on the mat\n", "the dog did not\n"] * 10
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def recipe(task: str = "causal-lm", config: dict[str, object] | None = None, **training: object) -> Recipe:
    return Recipe(
        task=task,
        data=DataSpec(block_size=16, max_length=12),
        model=ModelSpec(config={**LLAMA, **HEADS} if config is None else config),
        tokenizer=TokenizerSpec(train=TokenizerTraining(vocab_size=300, **training)),  # type: ignore[arg-type]
    )


def build_model(recipe: Recipe, *labels: str) -> Any:
    return TASKS[recipe.task].build_model(RecipeParts(recipe, TOKENIZER, None, None, labels))


@given(count=st.integers(2, 100), block=st.integers(2, 17))
def test_blocks_hold_every_token_once(count: int, block: int) -> None:
    blocks = Blocks(torch.arange(1, count + 1), block, padding=0)
    labels = torch.cat([blocks[index]["labels"] for index in range(len(blocks))])
    assert labels[labels != IGNORED].tolist() == list(range(1, count + 1))
    assert all(blocks[index]["input_ids"].shape == (block,) for index in range(len(blocks)))
    assert len(blocks) == -(-count // block)


def test_packing_ends_each_text_and_decodes_back() -> None:
    tokenizer = build_tokenizer(recipe(), WRITER, TEXTS)
    blocks = pack(TEXTS, tokenizer, 16)
    ids = torch.cat([blocks[index]["labels"] for index in range(len(blocks))])
    kept = ids[ids != IGNORED].tolist()
    assert kept.count(tokenizer.eos_token_id) == len(TEXTS)
    assert tokenizer.decode([i for i in kept if i != tokenizer.eos_token_id]) == "".join(TEXTS)


@given(text=st.text(max_size=30))
def test_byte_level_bpe_knows_every_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


TOKENIZER = build_tokenizer(recipe(), WRITER, TEXTS)


def test_a_tokenizer_is_the_same_every_time() -> None:
    again = build_tokenizer(recipe(), WRITER, TEXTS)
    assert again.get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])
def test_classifier_texts_stand_between_marks(algorithm: str) -> None:
    tokenizer = build_tokenizer(recipe("classification", algorithm=algorithm), CLASSIFIER, TEXTS)
    data = encode_labelled(["the cat", "the cat sat on the mat the dog did not sit"], [1, 0], tokenizer, 12)
    ids = data[0]["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert data[0]["labels"] == 1
    assert len(data[1]["input_ids"]) <= 12


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        pack([""], TOKENIZER, 16)


def test_the_model_takes_sizes_from_data_and_tokenizer() -> None:
    model = build_model(recipe())
    assert model.config.vocab_size == len(TOKENIZER)
    assert model.config.max_position_embeddings == 16
    assert model.config.eos_token_id == TOKENIZER.eos_token_id


def test_a_classifier_knows_its_classes() -> None:
    model = build_model(recipe("classification"), "neg", "pos")
    assert model.config.id2label == {0: "neg", 1: "pos"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, ["model.config.model_type='lama'", "llama"]),
        (
            {**LLAMA, "hiden_size": 3, "num_layrs": 2},
            ["2 problems", "hidden_size", "model.config.num_layrs=2"],
        ),
        ({**LLAMA, "num_labels": 3}, ["taken from the data"]),
        ({**LLAMA, "hidden_size": "big"}, ["model.config", "hidden_size"]),
        ({**LLAMA, **HEADS, "vocab_size": 10}, ["at least that"]),
        ({**LLAMA, **HEADS, "max_position_embeddings": 8}, ["data.block_size=16", "8 positions"]),
        ({"model_type": "vit"}, ["cannot be built for this task (AutoModelForCausalLM)"]),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(recipe(config=config))
    assert all(word in str(caught.value) for word in words), str(caught.value)
