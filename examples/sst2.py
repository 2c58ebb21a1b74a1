"""Sentiment of film reviews: a small BERT, trained from scratch through the `Trainer`.

    python examples/sst2.py                                  # SST-2 beside the checkout, in ../shared/data/sst2
    python examples/sst2.py --data path/to/sst2 --num_train_epochs 2
    python examples/sst2.py --help                           # every field of TrainingArguments is a flag

The folder holds `train.tsv` and `dev.tsv`, lines of `text<TAB>label` without a header line
(Socher et al. 2013, https://nlp.stanford.edu/sentiment). Nothing is downloaded: the tokenizer is trained on the
training sentences, and the model is built from a config.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from windlass import DataCollatorWithPadding, HfArgumentParser, Trainer, TrainingArguments, set_seed

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class DataArguments:
    data: str = field(
        default=str(ROOT.parent / "shared" / "data" / "sst2"),
        metadata={"help": "Folder of train.tsv and dev.tsv."},
    )
    max_length: int = field(default=64, metadata={"help": "Longer sentences are cut to so many tokens."})
    vocab_size: int = field(default=8000, metadata={"help": "Entries of the tokenizer that is trained."})


@dataclass
class SentimentArguments(TrainingArguments):
    """The recipe of this task as defaults; a flag changes any of them."""

    output_dir: str | None = "runs/sst2-example"
    num_train_epochs: float = 4
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    learning_rate: float = 5e-4
    weight_decay: float = 0.1
    warmup_steps: float = 0.1
    logging_steps: float = 50
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = "accuracy"


def read_tsv(path):
    with open(path, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [text for text, _ in rows], [int(label) for _, label in rows]


def train_tokenizer(texts, vocab_size):
    """Byte pairs of the training sentences only: a tokenizer that has seen the dev set would flatter the figures.

    The same texts give the same tokenizer, in every run and in every process; `WordPieceTrainer` does not promise that.
    """
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace()]
    )
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def encode(tokenizer, texts, labels, max_length):
    ids = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def build_model(tokenizer, max_length):
    # So little text is learnt by heart in a few passes: one layer and much dropout do better than more of either.
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_dropout_prob=0.3,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main():
    data_args, training_args = HfArgumentParser(
        (DataArguments, SentimentArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    folder = Path(data_args.data)
    train_texts, train_labels = read_tsv(folder / "train.tsv")
    dev_texts, dev_labels = read_tsv(folder / "dev.tsv")
    tokenizer = train_tokenizer(train_texts, data_args.vocab_size)

    trainer = Trainer(
        model=build_model(tokenizer, data_args.max_length),
        args=training_args,
        train_dataset=encode(tokenizer, train_texts, train_labels, data_args.max_length),
        eval_dataset=encode(tokenizer, dev_texts, dev_labels, data_args.max_length),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"dev accuracy {metrics['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
