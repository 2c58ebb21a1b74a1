"""Scores of generated answers against references, by name. BLEU and ROUGE are those of the packages that define them.

A score of one answer is a mapping of metrics; the score of a set is the mean over its answers, except BLEU, which is
that of the corpus.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from windlass.core.optional import require

Scores = dict[str, float]
ROUGE = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# With separators of thousands, such as 1,234.5.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_FINAL = "####"


def exact_match(answer: str, reference: str) -> Scores:
    """1 if both are the same text but for white space, else 0."""
    return {"exact_match": float(answer.split() == reference.split())}


def token_f1(answer: str, reference: str) -> Scores:
    """F1 of the words that both have, without case, punctuation and articles (Rajpurkar et al. 2016)."""
    ours, theirs = _words(answer), _words(reference)
    if not ours or not theirs:
        return {"token_f1": float(ours == theirs)}
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return {"token_f1": 2 * shared / (len(ours) + len(theirs))}


def _words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()


def gsm8k(answer: str, reference: str) -> Scores:
    """1 if the final numbers are equal, else 0 (Cobbe et al. 2021): the number after ####, else the last one."""
    ours, theirs = final_number(answer), final_number(reference)
    return {"gsm8k": float(ours is not None and ours == theirs)}


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last `####`, or the last number of a text without it; None if there is none."""
    _, mark, after = text.rpartition(_FINAL)
    found = _NUMBER.findall(after if mark else text)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", ""))


def rouge(answer: str, reference: str) -> Scores:
    """F-measures of ROUGE-1, -2 and -L with stemming, from 0 to 100 (Lin 2004)."""
    scorer = require("rouge_score.rouge_scorer", "measure ROUGE").RougeScorer(ROUGE, use_stemmer=True)
    score = scorer.score(reference, answer)
    return {kind: 100 * float(score[kind].fmeasure) for kind in ROUGE}


def bleu(answer: str, reference: str) -> Scores:
    """BLEU of one sentence, from 0 to 100, with orders that it has (`effective_order`)."""
    library = require("sacrebleu", "measure BLEU")
    return {"bleu": float(library.sentence_bleu(answer, [reference], use_effective_order=True).score)}


def corpus_bleu(answers: Sequence[str], references: Sequence[str]) -> Scores:
    """BLEU of a corpus, from 0 to 100 (Papineni et al. 2002; Post 2018)."""
    score = require("sacrebleu", "measure BLEU").corpus_bleu(list(answers), [list(references)])
    return {"bleu": float(score.score)}


SCORES: Mapping[str, Callable[[str, str], Scores]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "rouge": rouge,
    "bleu": bleu,
    "gsm8k": gsm8k,
}
_PACKAGES = {"rouge": "rouge_score.rouge_scorer", "bleu": "sacrebleu"}


def require_packages(names: Sequence[str]) -> None:
    """Import the packages of these scores. Raises ConfigError, which names what to install."""
    for name in names:
        if name in _PACKAGES:
            require(_PACKAGES[name], f"measure {name.upper()}")


def scores_of(names: Sequence[str], answer: str, reference: str) -> Scores:
    return {key: value for name in names for key, value in SCORES[name](answer, reference).items()}


def scores_of_set(names: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> Scores:
    """Return the scores of a set that is not empty."""
    found: Scores = {}
    for name in names:
        # BLEU of a corpus adds up matches before it divides: it is not the mean over sentences.
        if name == "bleu":
            found.update(corpus_bleu(answers, references))
            continue
        rows: list[dict[str, Any]] = [
            SCORES[name](answer, reference) for answer, reference in zip(answers, references, strict=True)
        ]
        found.update({key: sum(row[key] for row in rows) / len(rows) for key in rows[0]})
    return found
