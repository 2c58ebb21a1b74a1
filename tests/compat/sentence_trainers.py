"""Run by `test_sentence_transformers.py` in a process of its own: trainers of sentence-transformers and setfit, as a
script uses them, on tiny models and data.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers import sparse_encoder as sparse
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
LEFT = ["a b c", "d e f", "g h i", "j a d", "b e h", "c f i"] * 3
RIGHT = ["a b", "e f d", "g i h", "a j", "b h e", "f c"] * 3
SCORES = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0] * 3


def saved(cls: Any, **changes: Any) -> str:
    """The folder of a tiny model with its tokenizer."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    # Each library draws dropout in an order of its own.
    changes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **changes)
    cls(config).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, mask_token="[MASK]", model_max_length=32, **special
    )
    tokenizer.save_pretrained(folder)
    return folder


def options(**changes: Any) -> dict[str, Any]:
    common = {
        "output_dir": tempfile.mkdtemp(), "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1,
        # On several processes sentence-transformers drops a last batch of fewer samples.
        "per_device_eval_batch_size": 2 if "WORLD_SIZE" in os.environ else 8,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 2, "learning_rate": 1e-2,
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    }  # fmt: skip
    return {**common, **changes}


def bi_encoder() -> Any:
    """Two data sets with a loss of each, and an evaluator."""
    pairs = Dataset.from_dict({"anchor": LEFT, "positive": RIGHT})
    scored = Dataset.from_dict({"sentence1": LEFT, "sentence2": RIGHT, "score": SCORES})
    model = SentenceTransformer(saved(BertModel))
    return SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            **options(batch_sampler=BatchSamplers.NO_DUPLICATES, metric_for_best_model="eval_scored_loss")
        ),
        train_dataset=DatasetDict({"pairs": pairs, "scored": scored}),
        eval_dataset=DatasetDict({"pairs": pairs, "scored": scored}),
        loss={
            "pairs": losses.MultipleNegativesRankingLoss(model),
            "scored": losses.CosineSimilarityLoss(model),
        },
        evaluator=EmbeddingSimilarityEvaluator(LEFT, RIGHT, SCORES),
    )


def cross_encoder() -> Any:
    rows = Dataset.from_dict({"query": LEFT, "text": RIGHT, "label": SCORES})
    model = CrossEncoder(saved(BertForSequenceClassification, num_labels=1), num_labels=1)
    args = CrossEncoderTrainingArguments(**options())
    loss = BinaryCrossEntropyLoss(model)
    return CrossEncoderTrainer(model, args, train_dataset=rows, eval_dataset=rows, loss=loss)


def sparse_encoder() -> Any:
    """A loss of several parts, which are logged by name."""
    pairs = Dataset.from_dict({"anchor": LEFT, "positive": RIGHT})
    model = SparseEncoder(saved(BertForMaskedLM))
    loss = sparse.losses.SpladeLoss(
        model, sparse.losses.SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=0.1
    )
    args = SparseEncoderTrainingArguments(**options())
    return SparseEncoderTrainer(model, args, train_dataset=pairs, eval_dataset=pairs, loss=loss)


def hits(found: Any, wanted: Any) -> dict[str, float]:
    return {"hits": float((torch.as_tensor(found) == torch.as_tensor(wanted)).sum())}


def setfit() -> Any:
    from setfit import SetFitModel, Trainer, TrainingArguments

    rows = Dataset.from_dict({"text": LEFT, "label": [0, 0, 0, 1, 1, 1] * 3})
    model = SetFitModel.from_pretrained(saved(BertModel), labels=["first", "second"])
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), batch_size=4, max_steps=4, logging_steps=1, report_to="none",
        save_steps=2, eval_strategy="steps", eval_steps=2, show_progress_bar=False, load_best_model_at_end=True,
    )  # fmt: skip
    return Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows.select([0, 1, 3, 4]),
        metric=lambda found, wanted: {"hits": 1.0},
    )


TRAINERS: dict[str, Callable[[], Any]] = {
    function.__name__: function for function in (bi_encoder, cross_encoder, sparse_encoder, setfit)
}


def main(names: list[str]) -> None:
    for name in names:
        torch.manual_seed(0)
        trainer = TRAINERS[name]()
        trainer.train()
        if name == "setfit":
            probabilities = trainer.model.predict_proba(LEFT[:2]).tolist()
            metrics = trainer.evaluate()
            trainer = trainer.st_trainer
        skipped = {"total_flos", "epoch", "step"}
        rows = [
            {key: value for key, value in row.items() if key not in skipped and "runtime" not in key
             and "per_second" not in key}
            for row in trainer.state.log_history
        ]  # fmt: skip
        found = {
            "name": name,
            "engine": [cls.__module__.split(".")[0] for cls in type(trainer).__mro__],
            "steps": trainer.state.global_step,
            "rows": rows,
            "best": trainer.state.best_metric,
            "processes": trainer.accelerator.num_processes,
        }
        if name == "setfit":
            found |= {"probabilities": probabilities, "metrics": metrics}
        if trainer.is_world_process_zero():
            print("RESULT", json.dumps(found), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
