"""Scores of answers: by hand, and those of the packages."""

from __future__ import annotations

import pytest

from windlass.metrics.answer_scores import (
    exact_match,
    final_number,
    gsm8k,
    scores_of,
    scores_of_set,
    token_f1,
)


def test_exact_match_reads_white_space_alone_as_equal() -> None:
    assert exact_match("two  dogs\n", "two dogs") == {"exact_match": 1.0}
    assert exact_match("Two dogs", "two dogs") == {"exact_match": 0.0}


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat cat mat", "cat sat", 2 * 1 / 5),  # a repeated word counts once
        ("", "cat", 0.0),
        ("the", "", 1.0),  # both without words
    ],
)
def test_token_f1(answer: str, reference: str, score: float) -> None:
    assert token_f1(answer, reference) == {"token_f1": score}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 eggs.\n#### 1,234", 1234.0),
        ("first 2, then -3.50", -3.5),
        ("The answer is 18.", 18.0),
        ("#### none", None),
        ("no number", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_gsm8k_compares_numbers() -> None:
    assert gsm8k("so 5 * 2 is 10.0", "...\n#### 10") == {"gsm8k": 1.0}
    assert gsm8k("#### 9007199254740993", "#### 9007199254740992") == {"gsm8k": 0.0}, (
        "as floats they are equal"
    )
    assert gsm8k("no idea", "no number") == {"gsm8k": 0.0}, (
        "two texts without a number are not a right answer"
    )


def test_a_set_has_means_and_the_corpus_bleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    answers = ["the cat sat on the mat", "two dogs run past one old red barn"]
    references = ["the cat sat on a mat", "two dogs run past my quiet green field"]
    found = scores_of_set(["exact_match", "rouge", "bleu"], answers, references)
    rows = [scores_of(["rouge"], *pair) for pair in zip(answers, references, strict=True)]
    assert found["rouge1"] == pytest.approx(sum(row["rouge1"] for row in rows) / 2)
    assert found["bleu"] == sacrebleu.corpus_bleu(answers, [references]).score
    assert found["exact_match"] == 0.0
