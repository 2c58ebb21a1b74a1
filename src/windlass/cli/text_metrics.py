"""Metrics of generated text, by the packages that define them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from windlass.core.optional import require
from windlass.core.types import EvalPrediction

Score = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
# What the final weights generate, one text a line, in the run's folder.
PREDICTIONS = "predictions.txt"
ROUGE = ("rouge1", "rouge2", "rougeL")


def bleu(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU of a corpus, from 0 to 100 (Papineni et al. 2002; Post 2018)."""
    score = require("sacrebleu", "measure BLEU").corpus_bleu(list(texts), [list(references)])
    return {"bleu": float(score.score)}


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F-measures of ROUGE-1, -2 and -L with stemming, from 0 to 100 (Lin 2004)."""
    scorer = require("rouge_score.rouge_scorer", "measure ROUGE").RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {kind: 100 * float(np.mean([score[kind].fmeasure for score in scores])) for kind in ROUGE}


SCORES: dict[str, Score] = {"bleu": bleu, "rouge": rouge}


def decoded(tokenizer: Any, ids: Any) -> list[str]:
    """The texts of token ids, an array of shape (samples, tokens) padded with -100; each on one line."""
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def of_predictions(tokenizer: Any, score: Score) -> Callable[[EvalPrediction], dict[str, float]]:
    """`compute_metrics` of this score."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return score(decoded(tokenizer, prediction.predictions), decoded(tokenizer, prediction.label_ids))

    return compute_metrics
