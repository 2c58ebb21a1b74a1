from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from windlass.recipes.schema import TokenizerTraining
from windlass.recipes.tokenizing import CLASSIFIER, train_tokenizer


def _texts() -> list[str]:
    """Words of few letters, whose pairs are often equally frequent."""
    draw = random.Random(0)
    return [
        " ".join("".join(draw.choices("abcdefghij", k=draw.randint(1, 8))) for _ in range(12))
        for _ in range(60)
    ]


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])
def test_the_same_texts_give_the_same_tokenizer(algorithm: str) -> None:
    training = TokenizerTraining(algorithm=algorithm, vocab_size=200)
    written = {train_tokenizer(training, CLASSIFIER, _texts()).backend_tokenizer.to_str() for _ in range(4)}
    assert len(written) == 1


def test_only_the_marks_are_special() -> None:
    training = TokenizerTraining(algorithm="wordpiece", vocab_size=200)
    tokenizer = train_tokenizer(training, CLASSIFIER, _texts())
    assert set(tokenizer.all_special_tokens) == set(CLASSIFIER.special_tokens.values())
    assert set(tokenizer.get_added_vocab()) == set(CLASSIFIER.special_tokens.values())
    assert len(tokenizer) == 200
    text = _texts()[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
